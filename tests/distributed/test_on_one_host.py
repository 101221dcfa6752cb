"""Transports through memory that GPUs of one host read from each other, without GPUs (pretended_gpus.py)."""

from __future__ import annotations

import threading
import time
import weakref
from unittest import mock

import pytest
import torch
from tiers import thin
from torch import Tensor

from distributed.pretended_calls import BRAIN, CALLS, HALF, SINGLE, check, sum_on, summed
from distributed.pretended_gpus import Host, Stream
from distributed.pretended_kernels import PATIENCE
from fastattention import ArgumentError
from fastattention.distributed.ring_order import MOST_BLOCKS
from fastattention.distributed.transports import on_one_host
from fastattention.distributed.transports.copy_engine import CopyEngine
from fastattention.distributed.transports.on_one_host import OnOneHost
from fastattention.distributed.transports.peer_kernel import PeerKernel
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.gpu_runtime.peer_memory import GRANULE


@pytest.fixture(params=[CopyEngine, PeerKernel, RingProduct], ids=lambda transport: transport.name)
def kind(request: pytest.FixtureRequest) -> type[OnOneHost]:
    transport: type[OnOneHost] = request.param
    return transport


@thin(quick=4, all=4)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_all_sizes_one_after_the_other_are_right_however_streams_run(kind: type[OnOneHost], size: int) -> None:
    calls = list(enumerate([*CALLS.values(), *reversed(CALLS.values())] * 2))

    def task(transport: OnOneHost, rank: int, stream: Stream) -> list[Tensor]:
        return [sum_on(transport, rank, stream, call, blocks, **like) for call, (blocks, like) in calls]

    for results in Host(size, kind).run(task):
        for (call, (blocks, like)), found in zip(calls, results, strict=True):
            check(found, kind, size, call, blocks, **like)


def test_blocks_are_summed_while_later_ones_are_computed(kind: type[OnOneHost]) -> None:
    blocks, like = (5, 8, 3, 2, 9), {"hidden": 24, "dtype": HALF}
    expected = summed(kind, 3, 0, blocks, **like)

    def await_first(block: int, out: Tensor) -> None:
        deadline = time.monotonic() + PATIENCE
        while block == 4 and not torch.equal(out[:5], expected[:5]):
            assert time.monotonic() < deadline, "the first block is not summed before the last is computed"
            time.sleep(0)

    def task(transport: OnOneHost, rank: int, stream: Stream) -> Tensor:
        return sum_on(transport, rank, stream, 0, blocks, before=await_first, **like)

    for found in Host(3, kind).run(task):
        check(found, kind, 3, 0, blocks, **like)


@thin(quick=5)
@pytest.mark.parametrize(
    ("blocks", "fails_at"),
    [((5, 6, 7), 0), ((5, 6, 7), 1), ((5, 6, 7), 2), ((18,), 0), ((1,) * 37, 20), ((5, 6, 7, 9, 2), 4)],
)
def test_calls_are_right_after_one_that_failed_on_all_ranks(
    kind: type[OnOneHost], blocks: tuple[int, ...], fails_at: int
) -> None:
    if kind is RingProduct and len(blocks) > MOST_BLOCKS:
        pytest.skip("of blocks that are joined, ranks compute rows in different orders, and do not fail at one point")
    like = {"hidden": 21, "dtype": BRAIN}
    calls = list(enumerate([(4, 4, 5), (3,), (2, 30, 4, 1), (700, 1, 2, GRANULE // 40)], start=2))

    def task(transport: OnOneHost, rank: int, stream: Stream) -> list[Tensor]:
        results = []
        for call, after in calls:
            with pytest.raises(MemoryError, match=f"no memory for block {fails_at}"):
                sum_on(transport, rank, stream, call + 100, blocks, fails_at=fails_at, **like)
            results.append(sum_on(transport, rank, stream, call, after, **like))
        return results

    for results in Host(3, kind).run(task):
        for (call, after), found in zip(calls, results, strict=True):
            check(found, kind, 3, call, after, **like)


def test_calls_on_different_streams_run_one_after_the_other(kind: type[OnOneHost]) -> None:
    blocks, like = (8, 8, 8, 8), {"hidden": 16, "dtype": BRAIN}
    host = Host(3, kind)

    def task(transport: OnOneHost, rank: int, stream: Stream) -> list[Tensor]:
        streams, results = host.here.streams, []
        streams.insert(1, Stream())
        for call in range(12):
            streams[0], streams[1] = streams[1], streams[0]  # the first is the current one
            results.append(sum_on(transport, rank, streams[0], call, blocks, **like))
        return results

    for results in host.run(task):
        for call, found in enumerate(results):
            check(found, kind, 3, call, blocks, **like)


@pytest.mark.parametrize("watched", [CopyEngine, RingProduct], ids=lambda transport: transport.name)
def test_a_watch_is_told_of_every_call_that_is_no_graph_s(watched: type[CopyEngine | RingProduct]) -> None:
    """When it is over: a number written too early, or by a replay, would end a process that works."""
    like = {"hidden": 16, "dtype": BRAIN}

    def task(transport: CopyEngine | RingProduct, rank: int, stream: Stream) -> None:
        watch = transport._watch
        assert watch._seconds == 77.0
        for call in range(1, 4):
            sum_on(transport, rank, stream, call, (4, 4), **like)
            stream.synchronize()
            assert watch.is_idle
            assert watch.finished == watch._enqueued == call
        happened = threading.Event()
        getattr(transport, "_gathering", transport._stream).enqueue(lambda: happened.wait(PATIENCE))
        sum_on(transport, rank, stream, 4, (4, 4), **like)
        time.sleep(0.1)  # for what does not wait
        assert not watch.is_idle
        happened.set()
        stream.synchronize()
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 5, (4, 4), **like)
        stream.synchronize()
        assert watch.finished == watch._enqueued == 4

    Host(1, watched, timeout=77.0).run(task)


def test_memory_taken_in_inference_mode_serves_calls_out_of_it(kind: type[OnOneHost]) -> None:
    def task(transport: OnOneHost, rank: int, stream: Stream) -> Tensor:
        with torch.inference_mode():
            sum_on(transport, rank, stream, 0, (4, 4), hidden=8, dtype=SINGLE)
        stream.synchronize()  # what follows is done at once, by this thread
        with torch.no_grad():
            partials = transport.begin(torch.empty(8, 8), [8])
            return torch.mm(torch.ones(8, 2), torch.ones(2, 8), out=partials).clone()

    for product in Host(2, kind).run(task):
        assert (product == 2.0).all()


def test_memory_is_not_taken_while_a_graph_is_captured(kind: type[OnOneHost]) -> None:
    like = {"hidden": 256, "dtype": SINGLE}

    def task(transport: OnOneHost, rank: int, stream: Stream) -> Tensor:
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 1, (8, 8), **like)
            with pytest.raises(
                ArgumentError, match=r"while a CUDA graph is captured: make the largest call once before"
            ):
                transport.begin(torch.empty(GRANULE), [GRANULE])
        return sum_on(transport, rank, stream, 2, (5, 11), **like)

    for found in Host(1, kind).run(task):
        check(found, kind, 1, 2, (5, 11), **like)


def test_memory_that_a_graph_uses_is_kept_when_larger_takes_its_place(kind: type[OnOneHost]) -> None:
    like = {"hidden": 256, "dtype": SINGLE}

    def task(transport: OnOneHost, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 1, (8, 8), **like)
        captured = memory_of(transport)
        sum_on(transport, rank, stream, 2, (GRANULE // 1024, GRANULE // 1024), **like)
        assert not captured & memory_of(transport)
        assert captured == transport._in_graphs

    Host(1, kind).run(task)


def memory_of(transport: OnOneHost) -> set[object]:
    """What peers read, and what a transport has besides."""
    return {transport._peers, *getattr(transport, "_parts", ())}


@pytest.mark.parametrize("blocks", [(8, 8), (16,)], ids=["blocks", "one-block"])
def test_either_kind_of_call_in_a_graph_keeps_what_peers_read(kind: type[OnOneHost], blocks: tuple[int, ...]) -> None:
    like = {"hidden": 256, "dtype": SINGLE}

    def task(transport: OnOneHost, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, 0, (16,), **like)
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        assert not transport._in_graphs
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 1, blocks, **like)
        assert transport._peers in transport._in_graphs

    Host(1, kind).run(task)


def test_what_peers_read_is_given_back_when_larger_takes_its_place_and_at_the_end(kind: type[OnOneHost]) -> None:
    like, granule = {"hidden": 256, "dtype": SINGLE}, GRANULE // 1024

    def task(transport: OnOneHost, rank: int, stream: Stream) -> list[list[bool]]:
        memory, alive = [], []
        for call, rows in enumerate([8, granule, 2 * granule, 3 * granule]):
            sum_on(transport, rank, stream, call, (rows, 8), **like)
            memory.append(weakref.ref(transport._peers))
            if call == 2:
                with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
                    sum_on(transport, rank, stream, call, (rows, 8), **like)
            alive.append([one() is not None for one in memory])
        stream.synchronize()
        transport.close()
        return [*alive, [one() is not None for one in memory]]

    [alive] = Host(1, kind).run(task)
    assert alive[:3] == [[True], [False, True], [False, False, True]]
    assert alive[3:] == [[False, False, True, True], [False] * 4]


def test_memory_that_is_given_back_is_taken_anew_by_the_next_call(kind: type[OnOneHost]) -> None:
    like = {"hidden": 40, "dtype": SINGLE}

    def task(transport: OnOneHost, rank: int, stream: Stream) -> list[Tensor]:
        transport.release()  # nothing yet
        results = []
        for call in range(3):
            results.append(sum_on(transport, rank, stream, call, (7, 5), **like))
            memory = weakref.ref(transport._peers)
            transport.release()
            assert memory() is None
        return results

    for results in Host(3, kind).run(task):
        for call, found in enumerate(results):
            check(found, kind, 3, call, (7, 5), **like)


def test_what_is_reserved_can_be_captured(kind: type[OnOneHost]) -> None:
    like = {"hidden": 256, "dtype": SINGLE}
    rows = (GRANULE // 1024, 1000, 7)

    def task(transport: OnOneHost, rank: int, stream: Stream) -> list[Tensor]:
        results = [sum_on(transport, rank, stream, 0, (8, 8), **like)]
        transport.reserve(sum(rows) * 1024, max(rows) * 1024)
        memory = transport._peers
        transport.reserve(1024, 1024)  # it is there
        assert transport._peers is memory
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            results.append(sum_on(transport, rank, stream, 1, rows, **like))
        return results

    for first, captured in Host(1, kind).run(task):
        check(first, kind, 1, 0, (8, 8), **like)
        check(captured, kind, 1, 1, rows, **like)


def test_memory_that_a_graph_uses_is_not_given_back(kind: type[OnOneHost]) -> None:
    like = {"hidden": 256, "dtype": SINGLE}

    def task(transport: OnOneHost, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, 0, (8, 8), **like)
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True):
            sum_on(transport, rank, stream, 1, (8, 8), **like)
        captured = transport._peers
        transport.release()
        assert captured in transport._in_graphs
        sum_on(transport, rank, stream, 2, (8, 8), **like)
        assert transport._peers is not captured

    Host(1, kind).run(task)


GPU = torch.device("cuda", 1)


@pytest.fixture
def _four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(on_one_host.module, "why_unavailable", lambda: None)


@pytest.mark.usefixtures("_four_gpus")
def test_what_a_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_one_host._why_not_device(GPU) is None
    monkeypatch.setattr(on_one_host.module, "why_unavailable", lambda: "no compiler")
    assert on_one_host._why_not_device(GPU) == "no compiler"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    assert on_one_host._why_not_device(GPU) == "cuda:1 cannot read the memory of cuda:3"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert on_one_host._why_not_device(GPU) == "it is written for CUDA"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert "NCCL_P2P_DISABLE=1" in str(on_one_host._why_not_device(GPU))
    assert on_one_host._why_not_device(torch.device("cpu")) == "it is for GPUs, and tensors are on cpu"


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
    monkeypatch.setattr(on_one_host, "gather", lambda mine, group: answers)
    monkeypatch.setattr(on_one_host, "_why_not_device", lambda device: None)
    assert on_one_host._why_not_group(mock.Mock(), GPU) == reason
