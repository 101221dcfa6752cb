"""The transport peer_kernel on fake GPUs: launches of its kernel, and their parameters."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed.fake_calls import BRAIN, CALLS, HALF, SINGLE, FakeCall, check_calls
from distributed.fake_gpus import Host, Launch, Stream
from fastattention.distributed.transports import Transfer, peer_kernel
from fastattention.distributed.transports.all_reduce import MOST_CTAS, WARPS
from fastattention.distributed.transports.peer_kernel import BULK_CTAS, CTAS, ONE_SHOT_BYTES, PeerKernel

SMALL = FakeCall((12,))


def launches_of(host: Host, *calls: FakeCall) -> list[list[Launch]]:
    check_calls(host, calls)
    return host.launches


@pytest.mark.parametrize(("size", "gpu"), [(3, "A100"), (4, "RTX 4090"), (8, "H100")])
def test_every_number_of_ranks_and_either_way_of_reading_are_served(size: int, gpu: str) -> None:
    names = "uneven", "one block of a few hundred KiB", "more than a granule", "less than a share"
    check_calls(Host(size, PeerKernel, gpu), [CALLS[name] for name in names])


def test_plans_of_several_blocks_are_refused() -> None:
    def task(transport: PeerKernel, rank: int, stream: Stream) -> list[str | None]:
        return [transport.why_not(Transfer(12, 24, HALF, torch.device("cpu"), count)) for count in (1, 2)]

    assert Host(2, PeerKernel).run(task) == [[None, "it sums a call as a whole, and the partition has 2 blocks"]] * 2


def test_the_kernel_is_launched_once_behind_the_compute_on_its_stream() -> None:
    host = Host(2, PeerKernel)

    def task(transport: PeerKernel, rank: int, stream: Stream) -> None:
        def compute(start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
            assert (start, stop, adds) == (0, 12, False)
            assert len(host.launches[rank]) == call

        for call in range(3):
            out = torch.empty(12, 24, dtype=HALF)
            stream.kept.append(out)
            transport.run(compute, out, (12,))
            assert len(host.launches[rank]) == call + 1
        assert {launch.stream for launch in host.launches[rank]} == {stream}

    host.run(task)


def test_every_rank_adds_up_everything_of_small_calls() -> None:
    rows = ONE_SHOT_BYTES // 1024
    for launched in launches_of(
        Host(2, PeerKernel), *(FakeCall((count,), 512, BRAIN) for count in (1, rows, rows + 1))
    ):
        assert [launch.params.one_shot for launch in launched] == [1, 1, 0]


@pytest.mark.parametrize("gpus", [("V100",) * 2, ("RTX 4090",) * 2, ("H100", "A100"), ("H100",) * 2], ids="-".join)
def test_bulk_copies_and_ctas_are_the_same_on_all_ranks(gpus: tuple[str, str]) -> None:
    """CTAs with the same index take the same packets on all ranks, and all have work."""
    bulk_copies = gpus == ("H100", "H100")
    most = BULK_CTAS if bulk_copies else CTAS
    a_cta = 16 * 32 * WARPS // 512  # rows that it sums at a time
    ctas = {1: 1, a_cta: 1, a_cta + 1: 2, 4096: most}  # by rows of 512 bytes
    assert 2 * most * a_cta <= 4096
    assert most <= MOST_CTAS
    for launched in launches_of(Host(2, PeerKernel, gpus), *(FakeCall((count,), 128, SINGLE) for count in ctas)):
        assert [launch.params.num_ctas for launch in launched] == list(ctas.values())
        assert {launch.config.bulk_copies for launch in launched} == {bulk_copies}


@pytest.mark.parametrize(("timeout", "seconds"), [(0.75, 0.75), (17.0, 17.0), (86400.0, 86400.0), (1e12, 1e9)])
def test_a_rank_is_waited_for_as_long_as_the_timeout_of_the_group(timeout: float, seconds: float) -> None:
    [[launch]] = launches_of(Host(1, PeerKernel, timeout=timeout), SMALL)
    assert launch.params.timeout == seconds * 1e9


def test_launches_are_prepared_once_a_size_and_dtype_so_graphs_replay_them() -> None:
    calls = [FakeCall((rows,), 24, dtype) for rows, dtype in ((12, HALF), (12, BRAIN), (13, BRAIN), (12, SINGLE))]
    host = Host(2, PeerKernel)
    with mock.patch.object(peer_kernel, "make_params", wraps=peer_kernel.make_params) as made:
        check_calls(host, calls * 3)
    assert made.call_count == 2 * len(calls)
    for launched in host.launches:
        for first, *again in (launched[place :: len(calls)] for place in range(len(calls))):
            assert first.config.dtype is calls[launched.index(first)].dtype
            for launch in (first, *again):
                launch.params.out = 0
            assert {bytes(launch.params) for launch in again} == {bytes(first.params)}


def test_prepared_launches_stay_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_kernel, "MOST_PREPARED", 3)
    calls = [FakeCall((rows,)) for rows in (1, 2, 3, 4, 1)]
    assert check_calls(Host(1, PeerKernel), calls, lambda transport: len(transport._prepared)) == [[1, 2, 3, 1, 2]]
