"""benchmarks/long_context.py keeps the layers where it says, and its policies agree."""

from __future__ import annotations

import long_context
import pytest
import torch
from tiers import slow

from fastattention.offload.hardware import PRESETS
from fastattention.offload.model_shape import ModelShape

from .fake_device import FakeDevice

pytestmark = slow

TINY = ModelShape("tiny", 4, 4, 2, 16, 64, 96, 128, dtype_bytes=4)
CASES = (
    long_context.Case("tiny", 512, 0),
    long_context.Case("tiny", 512, 1),
    long_context.Case("tiny", 256, 0),
    long_context.Case("tiny", 256, 1),
    long_context.Case("tiny", 500, 4, batch_size=2),
    long_context.Case("tiny", 512, 3, quantized=True),
)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    monkeypatch.setitem(long_context.PRESETS, "tiny", TINY)
    monkeypatch.setattr(long_context, "PAGE_SIZE", 8)
    monkeypatch.setattr(long_context, "CHUNK", 64)
    return long_context.run_cases(CASES, FakeDevice(), lambda _: PRESETS["v100"], torch.float32, rounds=1, steps=1)


def test_every_policy_is_timed_predicted_and_agrees(rows: list[dict[str, object]]) -> None:
    for case, row in zip(CASES, rows, strict=True):
        policies = {"classical", "cooperative", "hybrid"} if case.num_layers_cpu else {"resident"}
        for name in ("seconds", "predicted", "difference"):
            figures = row[name]
            assert isinstance(figures, dict)
            assert figures.keys() == policies
            assert all(figure > 0 for figure in figures.values()) or name == "difference"
            assert all(figure < 1e-5 for figure in figures.values()) or name != "difference"
        assert isinstance(row["kv_cpu_bytes"], int)
        assert (row["kv_cpu_bytes"] > 0) == (case.num_layers_cpu > 0)


def test_steps_of_a_length_are_predicted_by_the_resident_one_of_that_length(rows: list[dict[str, object]]) -> None:
    found = {(case.seqlen, case.num_layers_cpu): row for case, row in zip(CASES, rows, strict=True)}
    overheads = {place: row["hardware"]["layer_overhead_seconds"] for place, row in found.items()}  # type: ignore[index]
    first, second = overheads[512, 0], overheads[256, 0]
    assert first != second
    assert overheads == {
        (512, 0): first,
        (512, 1): first,
        (256, 0): second,
        (256, 1): second,
        (500, 4): first,
        (512, 3): first,
    }
