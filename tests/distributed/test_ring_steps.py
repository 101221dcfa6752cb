"""The prepared steps of ring_product for calls of a kind, on fake GPUs."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from cuda.bindings import driver

from distributed.fake_calls import BRAIN, FakeCall, check_calls, sum_on_two_streams
from distributed.fake_gpus import Host, Stream
from fastattention.distributed.transports import ring_steps
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.errors import CompileError
from fastattention.gpu_runtime import streams

FIRST = FakeCall((5, 23, 1, 7), 5)
OTHERS = [FIRST._replace(blocks=(5, 23, 8)), FIRST._replace(hidden=4), FIRST._replace(dtype=BRAIN)]


@pytest.mark.parametrize(
    ("calls", "counts"),
    [
        ([FIRST] * 3, [1, 1, 1]),
        *(([other, FIRST, other, FIRST], [1, 2, 2, 2]) for other in OTHERS),
        ([*OTHERS, OTHERS[0]], [1, 2, 1, 2]),  # with room for two
    ],
    ids=["same", "blocks", "hidden", "dtype", "bounded"],
)
def test_calls_of_a_kind_have_the_same_steps_whatever_their_result(
    calls: list[FakeCall], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_steps, "MOST_KEPT", 2)

    def kept(transport: RingProduct) -> dict[ring_steps.Kind, int]:
        assert transport._steps is not None
        return {kind: id(steps) for kind, (_, steps) in transport._steps._kept.items()}

    for found in check_calls(Host(3, RingProduct), calls, kept):
        assert [len(each) for each in found] == counts
        for before, after in pairwise(found):
            assert len(after) < len(before) or before.items() <= after.items()


def test_calls_on_another_stream_or_in_inference_mode_have_their_own() -> None:
    """A view made in inference mode cannot be written outside of it."""
    host = Host(3, RingProduct)

    def task(transport: RingProduct, rank: int, stream: Stream) -> None:
        list(sum_on_two_streams(host, transport, rank, FIRST, [False, False, True, True] * 2))
        assert transport._steps is not None
        kept = transport._steps._kept
        assert len(kept) == 4
        for kind, (on, steps) in kept.items():
            assert kind.stream == on.cuda_stream
            assert {step.sum.is_inference() for step in steps} == {kind.is_inference}

    host.run(task)


def test_an_error_of_the_driver_ends_what_is_enqueued_and_is_raised() -> None:
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    asked: list[str] = []

    def answer(name: str, status: object) -> Any:
        return lambda *_: (asked.append(name), (status,))[1]

    bindings = SimpleNamespace(cuMemcpyAsync=answer("copy", refused), cuStreamBatchMemOp=answer("flags", 0))
    writes = streams.FlagWrites([64], 1)
    with mock.patch.object(streams, "driver_bindings", return_value=bindings):
        operations = [writes.on(7), streams.copy_operation(1, 2, 5, 7), writes.on(7)]
    assert not asked
    with pytest.raises(CompileError, match="copying 5 bytes: the CUDA driver answers CUDA_ERROR_INVALID_VALUE"):
        streams.enqueue_all(operations)
    assert asked == ["flags", "copy"]
