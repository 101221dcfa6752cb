"""The transport copy_engine without GPUs: where its streams meet, and the memory of its own (pretended_gpus.py)."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from cuda.bindings import driver
from torch import Tensor

from distributed.pretended_calls import SINGLE, sum_on
from distributed.pretended_gpus import Host, Stream
from fastattention import ArgumentError
from fastattention.distributed.transports import meetings
from fastattention.distributed.transports.copy_engine import CopyEngine
from fastattention.distributed.transports.meetings import NUM_MEETINGS, Meetings
from fastattention.errors import CompileError
from fastattention.gpu_runtime import streams
from fastattention.gpu_runtime.peer_memory import FLAG_BYTES, GRANULE, PeerMemory


def test_memory_for_larger_blocks_is_not_taken_while_a_graph_is_captured() -> None:
    def task(transport: CopyEngine, rank: int, stream: Stream) -> None:
        like = {"hidden": 256, "dtype": SINGLE}
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        with (
            mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
            pytest.raises(ArgumentError, match="while a CUDA graph is captured"),
        ):
            sum_on(transport, rank, stream, 2, (16,), **like)

    Host(1).run(task)


def test_closing_gives_the_parts_back() -> None:
    def task(transport: CopyEngine, rank: int, stream: Stream) -> tuple[list[int], list[int]]:
        sum_on(transport, rank, stream, 0, (8, 4), hidden=256, dtype=SINGLE)
        stream.synchronize()
        before = [parts.nbytes for parts in transport._parts]
        transport.close()
        return before, [parts.nbytes for parts in transport._parts]

    assert Host(1).run(task) == [([8 * 1024, 4 * 1024], [0, 0])]


def flags_of(size: int) -> list[list[tuple[list[int], list[int]]]]:
    """By rank and kind of meeting: flags for which it waits, those that it raises. Rank r's memory is at r << 32."""
    num_flags = Meetings.flags_needed(size)

    def rendezvous(memory: Tensor, _: object) -> SimpleNamespace:
        assert memory.nbytes == GRANULE + num_flags * FLAG_BYTES
        assert not memory[GRANULE:].any(), "flags are up before anybody has raised them"
        return SimpleNamespace(buffer_ptrs=[rank << 32 for rank in range(size)], memory=memory)

    def of(rank: int) -> list[tuple[list[int], list[int]]]:
        memory = PeerMemory(100, num_flags, torch.device("cpu"), "group")
        return Meetings(memory, rank, size)._meetings  # type: ignore[return-value]

    with (
        mock.patch.object(meetings, "Meeting", lambda mine, theirs: (mine, theirs)),
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch("torch.distributed._symmetric_memory.empty", lambda *shape, **like: torch.ones(*shape, **like)),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", rendezvous),
    ):
        return [of(rank) for rank in range(size)]


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
        assert 0 <= offset < Meetings.flags_needed(size) * FLAG_BYTES
    for kind, rank in itertools.product(range(NUM_MEETINGS), range(size)):
        mine, theirs = flags[rank][kind]
        assert {address >> 32 for address in theirs} == set(range(size)) - {rank}
        assert len(mine) == size - 1
        for other in set(range(size)) - {rank}:
            assert set(mine) & set(flags[other][kind][1]), "a meeting of one kind is one of another kind elsewhere"


Operation = tuple[str, int, int]


def written_out(operations: list[object]) -> list[Operation]:
    """What the driver is asked for: write or wait, where, and the value."""
    kinds, wait_equal = driver.CUstreamBatchMemOpType, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    found: list[Operation] = []
    for one in operations:
        if one.operation == kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32:
            found.append(("write", int(one.writeValue.address), int(one.writeValue.value)))
            assert one.writeValue.flags == 0  # after all that the stream has done before
        else:
            assert one.operation == kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
            assert one.waitValue.flags == wait_equal
            found.append(("wait", int(one.waitValue.address), int(one.waitValue.value)))
    return found


def test_a_meeting_raises_flags_and_lowers_those_it_has_waited_for() -> None:
    raised = [("write", 164, 1), ("write", 168, 1)]
    lowered = [("wait", 64, 1), ("write", 64, 0), ("wait", 68, 1), ("write", 68, 0)]
    assert written_out(streams.Meeting([64, 68], [164, 168])._operations) == [*raised, *lowered]
    assert written_out(streams.FlagWaits([64, 68])._operations) == lowered


def test_flags_are_written_in_their_order() -> None:
    assert written_out(streams.FlagWrites([68, 64], 0)._operations) == [("write", 68, 0), ("write", 64, 0)]
    assert written_out(streams.FlagWrites([72], 1)._operations) == [("write", 72, 1)]


def test_numbers_are_written_behind_all_that_the_stream_has_done_and_awaited_modulo_2_32() -> None:
    asked: list[tuple[object, ...]] = []
    done = driver.CUresult.CUDA_SUCCESS
    answering = SimpleNamespace(
        cuStreamWriteValue32=lambda *arguments: (asked.append(("write", *arguments)), (done,))[1],
        cuStreamWaitValue32=lambda *arguments: (asked.append(("wait", *arguments)), (done,))[1],
    )
    with mock.patch.object(streams, "driver_bindings", return_value=answering):
        streams.stream_write_value32(64, 2**32 - 1, 7)
        streams.stream_wait_value32(68, 5, 8)
    assert asked == [
        ("write", 7, 64, 2**32 - 1, driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT),
        ("wait", 8, 68, 5, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ),
    ]


def test_an_error_of_the_driver_is_raised() -> None:
    refused = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    names = ("cuMemcpyAsync", "cuStreamBatchMemOp", "cuStreamWriteValue32", "cuStreamWaitValue32")
    answering = SimpleNamespace(**dict.fromkeys(names, lambda *_: (refused,)))
    meeting, writes, waits = streams.Meeting([64], [164]), streams.FlagWrites([64], 1), streams.FlagWaits([64])
    with mock.patch.object(streams, "driver_bindings", return_value=answering):
        with pytest.raises(CompileError, match="copying 5 bytes: the CUDA driver answers CUDA_ERROR_INVALID_VALUE"):
            streams.copy_async(1, 2, 5, 0)
        with pytest.raises(CompileError, match="waiting for other GPUs: the CUDA driver answers"):
            meeting.enqueue(0)
        with pytest.raises(CompileError, match="writing flags: the CUDA driver answers"):
            writes.enqueue(0)
        with pytest.raises(CompileError, match="waiting for another GPU: the CUDA driver answers"):
            waits.enqueue(0)
        with pytest.raises(CompileError, match="writing a number: the CUDA driver answers"):
            streams.stream_write_value32(64, 1, 0)
        with pytest.raises(CompileError, match="waiting for a number: the CUDA driver answers"):
            streams.stream_wait_value32(64, 1, 0)
