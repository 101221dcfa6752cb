"""The question "npu" on a processor: what can be measured is, what cannot is listed with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastattention.cli.bench import npu
from fastattention.errors import ArgumentError


@pytest.fixture(autouse=True)
def processor_as_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "DEVICE", "cpu")
    monkeypatch.setattr(npu, "TOKENS", 32)


def test_who_cannot_run_is_listed_with_its_reason() -> None:
    records = npu.measure("Ascend910B2", [16], rounds=1, one_head=[32])
    assert len(records) == 2 * 2 + 1
    for one in records:
        assert one["tflops"]["SDPA"] > 0.0
        assert one["predicted_tflops"][npu.OURS] > 0.0
        assert "triton" in one["reasons"][npu.OURS]
        assert set(one["reasons"]) | set(one["tflops"]) == {
            npu.OURS, "torch_npu through us", "npu_fusion_attention", "SDPA",
        }  # fmt: skip


def test_an_npu_that_is_not_known_has_no_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    records = npu.measure("Ascend310P3", [16], rounds=1, one_head=[])
    assert all(one["predicted_tflops"] == {} for one in records)
    npu.show({"machine": {"npu": "Ascend310P3"}, "measurements": records})
    assert "Ascend310P3" in capsys.readouterr().out


def test_without_an_npu_the_question_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="needs an Ascend NPU: torch_npu is not installed"):
        npu.answer([16], 1, tmp_path)
