"""What ring_product has prepared for calls of a kind, on fake GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import driver

from distributed.fake_calls import BRAIN, Call, check_calls, sum_on
from distributed.fake_gpus import Host, Stream
from fastattention.distributed.transports import ring_steps
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.errors import CompileError
from fastattention.gpu_runtime import streams

FIRST = Call((5, 23, 1, 7), 5)


def kept_after_each(*calls: Call) -> list[list[list[tuple[tuple[int, ...], int]]]]:
    """By rank and call, which steps are kept then, by the rows of their kind. All calls are right."""

    def kept(transport: RingProduct) -> list[tuple[tuple[int, ...], int]]:
        assert transport._steps is not None
        return [(kind.rows, id(steps)) for kind, (_, steps) in transport._steps._kept.items()]

    return check_calls(Host(3, RingProduct), calls, kept)


def test_calls_of_a_kind_have_the_same_steps_whatever_their_result() -> None:
    for first, *others in kept_after_each(FIRST, FIRST, FIRST):
        assert [rows for rows, _ in first] == [FIRST.blocks]
        assert others == [first, first]


@pytest.mark.parametrize(
    "other",
    [FIRST._replace(blocks=(5, 23, 8)), FIRST._replace(hidden=4), FIRST._replace(dtype=BRAIN)],
    ids=["blocks", "hidden", "dtype"],
)
def test_calls_of_another_kind_have_their_own(other: Call) -> None:
    for kept in kept_after_each(other, FIRST, other, FIRST):
        assert [len(each) for each in kept] == [1, 2, 2, 2]


def test_what_is_kept_stays_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_steps, "MOST_KEPT", 2)
    for kept in kept_after_each(*(Call((rows, 2), 5) for rows in (1, 2, 3, 1))):
        assert [[rows[0] for rows, _ in each] for each in kept] == [[1], [1, 2], [3], [3, 1]]


def test_calls_on_another_stream_or_in_inference_mode_have_their_own() -> None:
    """A view that was made in that mode cannot be written out of it."""
    host = Host(3, RingProduct)

    def task(transport: RingProduct, rank: int, stream: Stream) -> None:
        here = host.here.streams
        here.insert(1, Stream())
        for number in range(8):
            here[0], here[1] = here[1], here[0]  # the first is the current one
            with torch.inference_mode(number // 2 % 2 == 1):
                sum_on(transport, rank, here[0], FIRST, number)
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
