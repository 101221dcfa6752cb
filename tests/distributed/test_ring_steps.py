"""What ring_product has prepared for calls of a kind, on pretended GPUs."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import driver
from torch import Tensor

from distributed.pretended_calls import BRAIN, HALF, SINGLE, check, sum_on
from distributed.pretended_gpus import Host, Stream
from fastattention.distributed.transports import ring_product, ring_steps
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.distributed.transports.ring_steps import Kind
from fastattention.errors import CompileError
from fastattention.gpu_runtime import streams
from fastattention.gpu_runtime.peer_memory import PeerMemory

SIZE = 3
BLOCKS = (5, 23, 1, 7)
Call = tuple[tuple[int, ...], dict[str, Any]]  # rows of each block, and their numbers
Kept = list[tuple[Kind, int]]  # each kind, and which steps they are


def kept_after_each(calls: list[Call]) -> list[list[Kept]]:
    """By rank and call, what is kept then. All calls are right."""

    def task(transport: RingProduct, rank: int, stream: Stream) -> tuple[list[Tensor], list[Kept]]:
        results, kept = [], []
        for call, (blocks, like) in enumerate(calls):
            results.append(sum_on(transport, rank, stream, call, blocks, **like))
            assert transport._steps is not None
            kept.append([(kind, id(steps)) for kind, (_, steps) in transport._steps._kept.items()])
        return results, kept

    ranks = Host(SIZE, RingProduct).run(task)
    for results, _ in ranks:
        for call, ((blocks, like), found) in enumerate(zip(calls, results, strict=True)):
            check(found, RingProduct, SIZE, call, blocks, **like)
    return [kept for _, kept in ranks]


def test_calls_of_a_kind_have_the_same_steps_whatever_their_result() -> None:
    alike: list[Call] = [(BLOCKS, {"hidden": 5, "dtype": HALF})] * 3
    for first, *others in kept_after_each(alike):
        assert [kind.rows for kind, _ in first] == [BLOCKS]
        assert others == [first, first]


@pytest.mark.parametrize(
    "other",
    [
        ((5, 23, 8), {"hidden": 5, "dtype": HALF}),
        (BLOCKS, {"hidden": 4, "dtype": HALF}),
        (BLOCKS, {"hidden": 5, "dtype": BRAIN}),
    ],
    ids=["blocks", "hidden", "dtype"],
)
def test_calls_of_another_kind_have_their_own(other: Call) -> None:
    first: Call = (BLOCKS, {"hidden": 5, "dtype": HALF})
    for _, *kept in kept_after_each([other, first, other, first]):
        assert [len(each) for each in kept] == [2, 2, 2]


def test_calls_on_another_stream_have_their_own() -> None:
    like = {"hidden": 5, "dtype": HALF}
    host = Host(SIZE, RingProduct)

    def task(transport: RingProduct, rank: int, stream: Stream) -> list[tuple[int, int]]:
        host.here.streams.insert(1, Stream())
        for call in range(4):
            host.here.streams[:2] = host.here.streams[1::-1]  # the first is the current one
            sum_on(transport, rank, host.here.streams[0], call, BLOCKS, **like)
        assert transport._steps is not None
        kept = transport._steps._kept.items()
        assert {kind.stream for kind, _ in kept} == {one.cuda_stream for one in host.here.streams[:2]}
        return [(kind.stream, on.cuda_stream) for kind, (on, _) in kept]

    for pairs in host.run(task):
        assert [first for first, _ in pairs] == [second for _, second in pairs]


def test_calls_in_inference_mode_have_their_own_whose_views_are_of_that_mode() -> None:
    """A view that was made in that mode cannot be written out of it."""

    def task(transport: RingProduct, rank: int, stream: Stream) -> dict[bool, set[bool]]:
        for call, mode in enumerate((True, False, True)):
            with torch.inference_mode(mode):
                sum_on(transport, rank, stream, call, BLOCKS, hidden=5, dtype=HALF)
        assert transport._steps is not None
        kept = transport._steps._kept.items()
        return {kind.is_inference: {step.sum.is_inference() for step in steps} for kind, (_, steps) in kept}

    for modes in Host(SIZE, RingProduct).run(task):
        assert modes == {True: {True}, False: {False}}


def test_memory_is_given_back_before_larger_is_taken_in_its_place() -> None:
    def task(transport: RingProduct, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, 0, BLOCKS, hidden=5, dtype=HALF)
        kept = weakref.ref(transport._peers)
        assert kept() is not None

        def take(*arguments: Any) -> PeerMemory:
            assert kept() is None
            return PeerMemory(*arguments)

        with mock.patch.object(ring_product, "PeerMemory", take):
            sum_on(transport, rank, stream, 1, (300, 300), hidden=2000, dtype=SINGLE)

    Host(1, RingProduct).run(task)


def test_larger_memory_has_steps_of_its_own() -> None:
    small: Call = (BLOCKS, {"hidden": 5, "dtype": HALF})
    large: Call = ((300, 300), {"hidden": 2000, "dtype": SINGLE})
    for before, with_large, again in kept_after_each([small, large, small]):
        assert [kind.rows for kind, _ in with_large] == [(300, 300)]
        assert [kind.rows for kind, _ in again] == [(300, 300), BLOCKS]
        assert before[0][0] == again[1][0]


def test_what_is_kept_stays_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_steps, "MOST_KEPT", 2)
    calls: list[Call] = [((rows, 2), {"hidden": 5, "dtype": HALF}) for rows in (1, 2, 3, 1)]
    for kept in kept_after_each(calls):
        assert [[kind.rows[0] for kind, _ in each] for each in kept] == [[1], [1, 2], [3], [3, 1]]


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
