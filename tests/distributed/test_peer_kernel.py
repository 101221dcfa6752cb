"""The transport peer_kernel without GPUs: when its kernel is launched, and with what (pretended_gpus.py)."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tiers import thin
from torch import Tensor

from distributed.pretended_calls import BRAIN, CALLS, HALF, SINGLE, check, sum_on
from distributed.pretended_gpus import Host, Launch, Stream
from distributed.pretended_kernels import flag_at
from fastattention.backends.cuda import all_reduce
from fastattention.backends.cuda.all_reduce import MOST_CTAS, Flags
from fastattention.backends.cuda.params import MOST_BLOCKS, MOST_PARTS, AllReduceParams
from fastattention.distributed.transports import Transfer, peer_kernel
from fastattention.distributed.transports.peer_kernel import (
    BULK_CTAS_ALONE,
    BULK_ROOMS,
    CTAS_ALONE,
    ROOMS,
    WHOLE_BYTES,
    PeerKernel,
)
from fastattention.gpu_runtime.peer_memory import GRANULE

SMALL = {"hidden": 24, "dtype": HALF}


def launches_of(host: Host, *calls: tuple[int, ...], **like: object) -> list[list[Launch]]:
    """By rank, those of some calls of the same rows but for their number."""

    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[Launch]:
        for call, blocks in enumerate(calls):
            sum_on(transport, rank, stream, call, blocks, **like)
        return host.here.launches  # type: ignore[no-any-return]

    return host.run(task)


def test_flags_lie_behind_what_peers_read_and_none_is_another() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> tuple[AllReduceParams, range]:
        sum_on(transport, rank, stream, 0, (7, 5), **SMALL)
        assert transport._peers is not None
        memory = transport._peers._handle.memory
        assert memory.data_ptr() == transport._peers.addresses[rank]
        behind = memory.data_ptr() + transport._peers.nbytes
        return host.here.launches[-1].params, range(behind, memory.data_ptr() + memory.nbytes)

    host = Host(3, PeerKernel)
    ranks = host.run(task)
    for rank, (params, behind) in enumerate(ranks):
        lengths = [
            (params.arrivals[rank], MOST_CTAS * MOST_PARTS),
            (params.steps, MOST_CTAS),
            (params.finished, 1),
            (params.ready, MOST_BLOCKS),
        ]
        flags = [start + 4 * number for start, length in lengths for number in range(length)]
        assert len(set(flags)) == len(flags)
        assert all(flag in behind and flag % 4 == 0 for flag in flags)
        for other, _ in ranks:
            assert other.arrivals[rank] == params.arrivals[rank]
            assert other.parts[rank] == params.parts[rank] == behind.start - GRANULE
        assert [*params.parts][3:] == [*params.arrivals][3:] == [None] * (MOST_PARTS - 3)


@pytest.mark.parametrize(("size", "gpu"), [(3, "A100"), (4, "RTX 4090"), (8, "H100")])
def test_every_number_of_ranks_and_either_way_of_reading_are_served(size: int, gpu: str) -> None:
    names = "uneven", "one block", "one block of a few hundred KiB", "more than a granule", "less than a share"
    calls = list(enumerate(CALLS[name] for name in names))

    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[Tensor]:
        return [sum_on(transport, rank, stream, call, blocks, **like) for call, (blocks, like) in calls]

    for results in Host(size, PeerKernel, gpu).run(task):
        for (call, (blocks, like)), found in zip(calls, results, strict=True):
            check(found, PeerKernel, size, call, blocks, **like)


def test_the_kernel_is_launched_once_a_call_and_behind_the_last_block() -> None:
    host = Host(2, PeerKernel)
    logs: list[list[str]] = [[], []]
    host.on_launch = lambda launch: logs[launch.params.rank].append(f"launch for {launch.params.num_blocks}")

    def task(transport: PeerKernel, rank: int, stream: Stream) -> None:
        out = torch.empty(12, 24, dtype=HALF)
        for blocks in ((3, 4, 5), (12,), (11, 1)):
            transport.run(lambda start, *_: logs[rank].append(f"compute {start}"), out, blocks)

    host.run(task)
    three = ["compute 0", "compute 3", "compute 7", "launch for 3"]
    assert logs == [[*three, "compute 0", "launch for 1", "compute 0", "compute 11", "launch for 2"]] * 2


def test_once_the_kernel_waits_it_needs_nothing_more_of_the_host() -> None:
    host, calls = Host(3, PeerKernel), [(3, 4, 5), (12,), (1, 1), (1,) * 40]
    host.on_launch = lambda launch: launch.stream.synchronize()

    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[Tensor]:
        return [sum_on(transport, rank, stream, call, blocks, **SMALL) for call, blocks in enumerate(calls)]

    for results in host.run(task):
        for call, (blocks, found) in enumerate(zip(calls, results, strict=True)):
            check(found, PeerKernel, 3, call, blocks, **SMALL)


@thin(quick=7)
@pytest.mark.parametrize("failing", [None, (3, 2), (37, 20), (16, 15), (16, 0)], ids=str)
@pytest.mark.parametrize("count", [2, 3, 15, 16, 17, 20, 33, 48, 49])
def test_a_flag_is_up_when_all_blocks_that_are_summed_together_are_computed(
    count: int, failing: tuple[int, int] | None
) -> None:
    """Also after a call that has raised some of them, and failed: before its first block is computed none is up."""
    together = -(-count // MOST_BLOCKS)

    def task(transport: PeerKernel, rank: int, stream: Stream) -> tuple[list[Tensor], list[Launch]]:
        def look(block: int, out: Tensor) -> None:
            assert transport._peers is not None
            flags = [flag_at(transport._peers.flag(rank, Flags.READY + number)).value for number in range(MOST_BLOCKS)]
            complete = block // together
            assert flags == [1] * complete + [0] * (MOST_BLOCKS - complete)

        if failing is not None:
            with pytest.raises(MemoryError):
                sum_on(transport, rank, stream, 9, (1,) * failing[0], fails_at=failing[1], **SMALL)
        calls = range(2)
        return [sum_on(transport, rank, stream, call, (1,) * count, before=look, **SMALL) for call in calls], launches()

    host = Host(2, PeerKernel)

    def launches() -> list[Launch]:
        return list(host.here.launches)

    for results, launched in host.run(task):
        for call, found in enumerate(results):
            check(found, PeerKernel, 2, call, (1,) * count, **SMALL)
        assert len(launched) == 2
        for params, _ in launched:
            assert params.num_blocks == -(-count // together) <= MOST_BLOCKS
            ends = [24 * min((number + 1) * together, count) for number in range(params.num_blocks)]
            assert list(params.ends) == ends + [0] * (MOST_BLOCKS - len(ends))


def test_flags_are_lowered_when_a_call_has_ended() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> None:
        for blocks in ((3, 4, 5), (1,) * 40, (12,)):
            sum_on(transport, rank, stream, 0, blocks, **SMALL)
            stream.synchronize()
            assert transport._peers is not None
            for number in [Flags.FINISHED, *range(Flags.READY, Flags.READY + MOST_BLOCKS)]:
                assert flag_at(transport._peers.flag(rank, number)).value == 0

    Host(2, PeerKernel).run(task)


def test_a_single_block_is_summed_on_the_stream_of_the_compute_and_blocks_beside_it() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[bool]:
        for blocks in ((12,), (7, 5), (12,)):
            sum_on(transport, rank, stream, 0, blocks, **SMALL)
        assert [bool(params.ready) for params, _ in host.here.launches] == [False, True, False]
        return [launch.stream is stream for launch in host.here.launches]

    host = Host(2, PeerKernel)
    assert host.run(task) == [[True, False, True]] * 2


@pytest.mark.parametrize(
    ("blocks", "whole"),
    [((1,), 1), ((256,), 1), ((257,), 0), ((5000,), 0), ((1, 1), 0), ((200, 56), 0), ((200, 57), 0)],
)
def test_every_rank_adds_up_everything_of_small_single_blocks(blocks: tuple[int, ...], whole: int) -> None:
    assert WHOLE_BYTES == 256 * 512 * 2
    for launched in launches_of(Host(2, PeerKernel), blocks, hidden=512, dtype=BRAIN):
        assert [params.whole for params, _ in launched] == [whole]


@pytest.mark.parametrize("gpu", ["V100", "A100", "RTX 4090", "H100"])
def test_ctas_are_the_same_on_all_ranks_and_have_something_to_do(gpu: str) -> None:
    rooms, alone = (BULK_ROOMS, BULK_CTAS_ALONE) if gpu == "H100" else (ROOMS, CTAS_ALONE)
    beside = rooms[0].ctas
    assert max(room.ctas for room in rooms) <= alone <= MOST_CTAS
    a_cta = 16 * 512  # bytes that it sums at a time
    rows = {  # of 512 bytes
        (1,): 1,
        (16,): 1,
        (17,): 2,  # all of it on either rank
        (16, 16): 1,  # half of it on either rank
        (16, 17): 2,
        (4096 - 7, 7): beside,  # of 2 MiB
        (4096,): alone,
    }
    assert 2 * alone * a_cta <= 4096 * 512
    host = Host(2, PeerKernel, gpu)
    launched = launches_of(host, *rows, hidden=128, dtype=SINGLE)
    assert [[params.num_ctas for params, _ in each] for each in launched] == [list(rows.values())] * 2


def test_a_call_has_the_ctas_of_its_room() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[int]:
        assert transport.rooms == BULK_ROOMS
        for room in range(len(BULK_ROOMS)):
            transport.run(lambda *_: None, torch.empty(4096, 128), (4000, 96), room)
        return [params.num_ctas for params, _ in host.here.launches]

    host = Host(2, PeerKernel, "H100")
    assert host.run(task) == [[room.ctas for room in BULK_ROOMS]] * 2


@pytest.mark.parametrize(("gpu", "held"), [("H100", 12), ("A100", 16)])
def test_a_gpu_whose_multiprocessors_it_would_hold_is_refused(gpu: str, held: int) -> None:
    transfer = Transfer(12, 24, HALF, torch.device("cpu"), 2)

    def task(transport: PeerKernel, rank: int, stream: Stream) -> str | None:
        return transport.why_not(transfer)

    for num_sms, reason in (
        (2 * held, None),
        (2 * held - 1, f"it would hold {held} of a GPU's {2 * held - 1} multiprocessors"),
    ):
        host = Host(2, PeerKernel, gpu)
        host._limits = host._limits._replace(num_sms=num_sms)
        assert host.run(task) == [reason] * 2


def test_a_launch_that_fails_leaves_no_flag_up() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[int]:
        enqueue = mock.Mock(side_effect=MemoryError("no memory for the kernel"))
        with mock.patch.object(all_reduce, "launcher", return_value=enqueue), pytest.raises(MemoryError):
            sum_on(transport, rank, stream, 0, (3, 4, 5), **SMALL)
        stream.synchronize()
        assert transport._peers is not None
        return [flag_at(transport._peers.flag(rank, Flags.READY + number)).value for number in range(MOST_BLOCKS)]

    assert Host(1, PeerKernel).run(task) == [[0] * MOST_BLOCKS]


def test_a_call_made_again_is_the_same_launch_so_that_graphs_can_replay_it() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[bytes]:
        out = torch.empty(12, 24, dtype=HALF)
        for blocks in [(3, 4, 5), (12,)] * 3:
            transport.run(lambda *_: None, out, blocks)
        return [bytes(params) for params, _ in host.here.launches]

    host = Host(2, PeerKernel)
    for several, single, *again in host.run(task):
        assert several != single
        assert again == [several, single] * 2


@pytest.mark.parametrize("timeout", [0.75, 17.0, 86400.0])
def test_a_rank_is_waited_for_as_long_as_the_timeout_of_the_group(timeout: float) -> None:
    [launched] = launches_of(Host(1, PeerKernel, timeout=timeout), (12,), (7, 5), **SMALL)
    assert [params.patience for params, _ in launched] == [timeout * 1e9] * 2


def test_closing_leaves_no_addresses_behind() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, 0, (7, 5), **SMALL)
        stream.synchronize()
        transport.close()
        assert transport._addresses is None
        assert not transport._raise
        assert not transport._prepared

    Host(1, PeerKernel).run(task)


def test_what_is_prepared_for_one_dtype_serves_no_other() -> None:
    calls = list(enumerate([HALF, BRAIN, SINGLE, HALF]))

    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[Tensor]:
        return [sum_on(transport, rank, stream, call, (5, 7), hidden=24, dtype=dtype) for call, dtype in calls]

    for results in Host(2, PeerKernel).run(task):
        for (call, dtype), found in zip(calls, results, strict=True):
            check(found, PeerKernel, 2, call, (5, 7), hidden=24, dtype=dtype)


def test_a_block_that_is_summed_beside_compute_awaits_it_and_one_alone_does_not() -> None:
    host = Host(2, PeerKernel)

    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[bool]:
        out = torch.empty(12, 24, dtype=HALF)
        for _ in range(2):
            partial = transport.begin(out, (12,))
            transport.all_reduce(partial, out).wait()
            transport.run(lambda *_: None, out, (12,))
        return [bool(params.ready) for params, _ in host.here.launches]

    assert host.run(task) == [[True, False] * 2] * 2


@pytest.mark.parametrize("blocks", [(12,), (5, 7)], ids=["one-block", "blocks"])
def test_a_call_that_is_over_is_forgotten(blocks: tuple[int, ...]) -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[object]:
        sum_on(transport, rank, stream, 0, blocks, **SMALL)
        return [transport._begun, transport._call]

    assert Host(2, PeerKernel).run(task) == [[None, None]] * 2


def test_after_its_memory_is_given_back_it_sums_in_other() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[Tensor]:
        before = sum_on(transport, rank, stream, 0, (5, 7), **SMALL)
        stream.synchronize()
        transport.release()
        assert not transport._prepared
        return [before, sum_on(transport, rank, stream, 1, (5, 7), **SMALL)]

    for results in Host(2, PeerKernel).run(task):
        for call, found in enumerate(results):
            check(found, PeerKernel, 2, call, (5, 7), **SMALL)


def test_what_is_prepared_stays_within_bounds() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> int:
        most = 0
        for rows in range(2, 12):
            sum_on(transport, rank, stream, 0, (rows, 1), **SMALL)
            most = max(most, len(transport._prepared))
        return most

    with mock.patch.object(peer_kernel, "MOST_PREPARED", 3):
        assert Host(1, PeerKernel).run(task) == [3]
