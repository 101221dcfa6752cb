"""The transport copy_engine without GPUs: its shares, its flags, and what it may overlap (pretended_gpus.py)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from cuda.bindings import driver
from torch import Tensor

from distributed.pretended_gpus import Host, Stream
from fastattention import ArgumentError
from fastattention.backends.cuda.jit import streams
from fastattention.distributed.tiled_allreduce import tiled_allreduce
from fastattention.distributed.transports import copy_engine, peer_memory
from fastattention.distributed.transports.copy_engine import CopyEngine
from fastattention.distributed.transports.peer_memory import FLAG_BYTES, GRANULE, NUM_MEETINGS, PeerMemory
from fastattention.errors import CompileError

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def share_of(rank: int, call: int, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(rows, hidden, generator=generator).to(dtype)


def summed(size: int, call: int, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    """In float32 in the order of the ranks, rounded once."""
    total = torch.zeros(rows, hidden)
    for rank in range(size):
        total += share_of(rank, call, rows, hidden, dtype).float()
    return total.to(dtype)


def sum_on(transport: CopyEngine, rank: int, stream: Stream, call: int, blocks: tuple[int, ...], **like: Any) -> Tensor:
    """One call; nothing waits for it."""
    mine = share_of(rank, call, sum(blocks), **like)
    around = torch.empty(mine.numel() + 32, dtype=mine.dtype).fill_(7.0)
    out = around[16:-16].view(mine.shape)

    def compute(start: int, stop: int, partial: Tensor) -> None:
        stream.enqueue(lambda: partial.copy_(mine[start:stop]))

    tiled_allreduce(compute, out, blocks, transport)
    return around


CALLS = {
    "even": ((8, 8, 8), {"hidden": 16, "dtype": BRAIN}),
    "uneven": ((5, 23, 1, 7), {"hidden": 37, "dtype": BRAIN}),
    "one block": ((33,), {"hidden": 24, "dtype": HALF}),
    "two blocks": ((2, 33), {"hidden": 40, "dtype": SINGLE}),
    "less than a share": ((1, 1, 2), {"hidden": 3, "dtype": HALF}),
    "one number": ((1,), {"hidden": 1, "dtype": BRAIN}),
    "more than a granule": ((700, 300, 200), {"hidden": 500, "dtype": SINGLE}),
}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_all_sizes_one_after_the_other_are_right_however_streams_run(size: int) -> None:
    host = Host(size)
    calls = list(enumerate([*CALLS.values(), *reversed(CALLS.values())] * 2))

    def task(transport: CopyEngine, rank: int, stream: Stream) -> list[Tensor]:
        return [sum_on(transport, rank, stream, call, blocks, **like) for call, (blocks, like) in calls]

    for arounds in host.run(task):
        for (call, (blocks, like)), around in zip(calls, arounds, strict=True):
            expected = summed(size, call, sum(blocks), **like)
            assert torch.equal(around[16:-16].view(expected.shape), expected), f"{blocks} {like}"
            assert (around[:16] == 7.0).all()
            assert (around[-16:] == 7.0).all()


def test_memory_taken_in_inference_mode_serves_calls_out_of_it() -> None:
    def task(transport: CopyEngine, rank: int, stream: Stream) -> Tensor:
        with torch.inference_mode():
            sum_on(transport, rank, stream, 0, (4, 4), hidden=8, dtype=SINGLE)
        with torch.no_grad():
            partials = transport.partials(torch.empty(8, 8))
            return torch.mm(torch.ones(8, 2), torch.ones(2, 8), out=partials).clone()

    for product in Host(2).run(task):
        assert (product == 2.0).all()


def test_memory_is_not_taken_while_a_graph_is_captured() -> None:
    def task(transport: CopyEngine, rank: int, stream: Stream) -> None:
        like = {"hidden": 256, "dtype": SINGLE}
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 1, (8, 8), **like)
            with pytest.raises(
                ArgumentError, match=r"while a CUDA graph is captured: make the largest call once before"
            ):
                transport.partials(torch.empty(GRANULE))
            with pytest.raises(ArgumentError, match="while a CUDA graph is captured"):
                sum_on(transport, rank, stream, 2, (16,), **like)

    Host(1).run(task)


def test_memory_that_a_graph_uses_is_kept_when_larger_takes_its_place() -> None:
    def task(transport: CopyEngine, rank: int, stream: Stream) -> None:
        like = {"hidden": 256, "dtype": SINGLE}
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 1, (8, 8), **like)
        captured = {transport._peers, *transport._parts}
        sum_on(transport, rank, stream, 2, (GRANULE // 1024, GRANULE // 1024), **like)
        assert not captured & {transport._peers, *transport._parts}
        assert captured == transport._in_graphs
        transport.close()
        assert not transport._in_graphs

    Host(1).run(task)


def flags_of(size: int) -> list[list[tuple[list[int], list[int]]]]:
    """By rank and kind of meeting: flags for which it waits, those that it raises. Rank r's memory is at r << 32."""

    def rendezvous(memory: Tensor, _: object) -> SimpleNamespace:
        assert not memory[GRANULE:].any(), "flags are up before anybody has raised them"
        return SimpleNamespace(buffer_ptrs=[rank << 32 for rank in range(size)], memory=memory)

    with (
        mock.patch.object(peer_memory, "Meeting", lambda mine, theirs: (mine, theirs)),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch("torch.distributed._symmetric_memory.empty", lambda *shape, **like: torch.ones(*shape, **like)),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
    ):
        return [PeerMemory(100, rank, size, torch.device("cpu"), "group")._meetings for rank in range(size)]  # type: ignore[misc]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_flag_has_one_that_writes_it_and_one_that_waits_in_its_own_memory(size: int) -> None:
    flags = flags_of(size)
    waited = [(address, rank) for rank in range(size) for mine, _ in flags[rank] for address in mine]
    written = [address for rank in range(size) for _, theirs in flags[rank] for address in theirs]
    assert len(set(written)) == len(written) == NUM_MEETINGS * size * (size - 1)
    assert sorted(written) == sorted(address for address, _ in waited)
    for address, rank in waited:
        assert address >> 32 == rank
        offset = address - (rank << 32) - GRANULE
        assert offset % FLAG_BYTES == 0
        assert 0 <= offset < NUM_MEETINGS * size * FLAG_BYTES
    for kind, rank in itertools.product(range(NUM_MEETINGS), range(size)):
        mine, theirs = flags[rank][kind]
        assert {address >> 32 for address in theirs} == set(range(size)) - {rank}
        assert len(mine) == size - 1
        for other in set(range(size)) - {rank}:
            assert set(mine) & set(flags[other][kind][1]), "a meeting of one kind is one of another kind elsewhere"


def test_a_meeting_raises_flags_and_lowers_those_it_has_waited_for() -> None:
    kinds, wait_equal = driver.CUstreamBatchMemOpType, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    found: list[tuple[str, int, int]] = []
    for one in streams.Meeting([64, 68], [164, 168])._operations:
        if one.operation == kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32:
            found.append(("write", int(one.writeValue.address), int(one.writeValue.value)))
            assert one.writeValue.flags == 0  # after all that the stream has done before
        else:
            assert one.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
            assert one.waitValue.flags == wait_equal
            found.append(("wait", int(one.waitValue.address), int(one.waitValue.value)))
    raised = [("write", 164, 1), ("write", 168, 1)]
    assert found == [*raised, ("wait", 64, 1), ("write", 64, 0), ("wait", 68, 1), ("write", 68, 0)]


def test_an_error_of_the_driver_is_raised() -> None:
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    answering = SimpleNamespace(cuMemcpyAsync=lambda *_: (refused,), cuStreamBatchMemOp=lambda *_: (refused,))
    meeting = streams.Meeting([64], [164])
    with mock.patch.object(streams, "driver_bindings", return_value=answering):
        with pytest.raises(CompileError, match="copying 5 bytes: the CUDA driver answers CUDA_ERROR_INVALID_VALUE"):
            streams.copy_async(1, 2, 5, 0)
        with pytest.raises(CompileError, match="waiting for other GPUs: the CUDA driver answers"):
            meeting.enqueue(0)


GPU = torch.device("cuda", 1)


@pytest.fixture
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(copy_engine.module, "why_unavailable", lambda: None)


@pytest.mark.usefixtures("_four_gpus")
def test_what_a_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_engine._why_not_device(GPU) is None
    monkeypatch.setattr(copy_engine.module, "why_unavailable", lambda: "no compiler")
    assert copy_engine._why_not_device(GPU) == "no compiler"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    assert copy_engine._why_not_device(GPU) == "cuda:1 cannot read the memory of cuda:3"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert copy_engine._why_not_device(GPU) == "it is written for CUDA"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE=1" in str(copy_engine._why_not_device(GPU))


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([("a", None)] * 8, None),
        ([("a", None)] * 9, "it adds up 8 parts at most, of 9 ranks"),
        ([("a", None), ("b", None)], "its ranks are on 2 hosts, and GPUs read each other's memory within one"),
        ([("a", None), ("a", "no compiler")], "no compiler"),
    ],
)
def test_the_reason_of_any_rank_is_that_of_all(
    answers: list[tuple[str, str | None]], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_engine, "gather", lambda mine, group: answers)
    monkeypatch.setattr(copy_engine, "_why_not_device", lambda device: None)
    assert copy_engine._why_not_group(mock.Mock(), GPU) == reason
