"""Transports through memory that GPUs of one host read from each other, on fake GPUs."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from tiers import sampled
from torch import Tensor

from distributed.fake_calls import BRAIN, CALLS, SINGLE, FakeCall, check_all, check_calls, sum_on, sum_on_two_streams
from distributed.fake_gpus import Host, Stream
from fastattention import ArgumentError
from fastattention.distributed.transports import Transfer, p2p_base, peer_kernel, ring_product
from fastattention.distributed.transports.p2p_base import PeerToPeer
from fastattention.distributed.transports.peer_kernel import PeerKernel
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.gpu_runtime.peer_memory import GRANULE, PeerMemory

GPU = torch.device("cuda", 1)
SMALL = FakeCall((8, 8), 256, SINGLE)
LARGE = FakeCall((GRANULE // 1024, GRANULE // 1024), 256, SINGLE)


@pytest.fixture(params=[PeerKernel, RingProduct], ids=lambda transport: transport.name)
def kind(request: pytest.FixtureRequest) -> type[PeerToPeer]:
    transport: type[PeerToPeer] = request.param
    return transport


@sampled
@pytest.mark.parametrize("size", [2, 3, 4])
def test_calls_of_all_sizes_are_right_however_streams_run(kind: type[PeerToPeer], size: int) -> None:
    check_calls(Host(size, kind), [*CALLS.values(), *reversed(CALLS.values())] * 2)


def test_calls_are_right_after_one_that_failed_on_all_ranks(kind: type[PeerToPeer]) -> None:
    """The call fails in its only block; test_ring_product.py tests others."""
    host, failing = Host(3, kind), FakeCall((18,), 21, BRAIN)
    calls = [FakeCall(after, 21, BRAIN) for after in ((4, 4, 5), (3,), (2, 30, 4, 1), (700, 1, 2, GRANULE // 40))]

    def task(transport: PeerToPeer, rank: int, stream: Stream) -> list[Tensor]:
        results = []
        for number, call in enumerate(calls):
            with pytest.raises(MemoryError, match="no memory for block 0"):
                sum_on(transport, rank, stream, failing, number, fails_at=0)
            results.append(sum_on(transport, rank, stream, call, number))
        return results

    check_all(host.run(task), host, calls)


def test_calls_on_different_streams_run_one_after_the_other(kind: type[PeerToPeer]) -> None:
    host, call = Host(3, kind), CALLS["even"]

    def task(transport: PeerToPeer, rank: int, stream: Stream) -> list[Tensor]:
        return list(sum_on_two_streams(host, transport, rank, call, [False] * 12))

    check_all(host.run(task), host, [call] * 12)


def test_memory_taken_in_inference_mode_serves_calls_out_of_it(kind: type[PeerToPeer]) -> None:
    def task(transport: PeerToPeer, rank: int, stream: Stream) -> None:
        def compute(start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
            torch.mm(torch.ones(stop - start, 2), torch.ones(2, 8), out=partial)

        for mode in (True, False):
            with torch.inference_mode(mode), torch.no_grad():
                out = torch.empty(8, 8)
                transport.run(compute, out, (8,))
                stream.synchronize()
                assert (out == 2.0).all()

    Host(1, kind).run(task)


def test_a_graph_captures_calls_whose_memory_is_there(kind: type[PeerToPeer]) -> None:
    host = Host(1, kind)

    def task(transport: PeerToPeer, rank: int, stream: Stream) -> list[Tensor]:
        results = [sum_on(transport, rank, stream, SMALL)]
        with host.capture(), pytest.raises(ArgumentError, match="captured: make the largest call once before"):
            sum_on(transport, rank, stream, LARGE)
        transport.reserve(2 * GRANULE)
        memory = transport._peers
        transport.reserve(1024)  # already there
        assert transport._peers is memory
        with host.capture():
            results.append(sum_on(transport, rank, stream, LARGE, 1))
        return [*results, sum_on(transport, rank, stream, SMALL, 2)]

    check_all(host.run(task), host, [SMALL, LARGE, SMALL])


def test_larger_memory_takes_the_place_of_smaller_which_is_given_back(kind: type[PeerToPeer]) -> None:
    """The smaller is freed before the larger is taken, once the GPU no longer uses it."""

    def task(transport: PeerToPeer, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, SMALL)
        small, is_unused = weakref.ref(transport._peers), threading.Event()
        stream.enqueue(lambda: time.sleep(0.05))
        stream.enqueue(is_unused.set)

        def take(*arguments: Any) -> PeerMemory:
            assert small() is None
            assert is_unused.is_set()
            return PeerMemory(*arguments)

        module = ring_product if kind is RingProduct else peer_kernel
        with mock.patch.object(module, "PeerMemory", take):
            sum_on(transport, rank, stream, LARGE)
        large = weakref.ref(transport._peers)
        sum_on(transport, rank, stream, SMALL)
        assert transport._peers is large() is not None
        transport.close()
        assert large() is None

    Host(1, kind).run(task)


def test_memory_that_a_graph_uses_is_kept_until_the_end(kind: type[PeerToPeer]) -> None:
    host = Host(1, kind)

    def task(transport: PeerToPeer, rank: int, stream: Stream) -> None:
        sum_on(transport, rank, stream, SMALL)
        assert not transport._in_graphs
        with host.capture():
            sum_on(transport, rank, stream, SMALL)
        small = weakref.ref(transport._peers)
        sum_on(transport, rank, stream, LARGE)
        with host.capture():
            sum_on(transport, rank, stream, SMALL)
        large = weakref.ref(transport._peers)
        transport.release()
        assert small() is not None
        assert large() is not None
        sum_on(transport, rank, stream, SMALL)
        assert transport._peers not in (small(), large())
        transport.close()
        assert small() is large() is None

    host.run(task)


def test_memory_that_is_given_back_is_taken_anew_by_the_next_call(kind: type[PeerToPeer]) -> None:
    def given_back(transport: PeerToPeer) -> None:
        memory = weakref.ref(transport._peers)
        transport.release()
        transport.release()  # nothing is left
        assert memory() is None

    check_calls(Host(3, kind), [FakeCall((7, 5), 40, SINGLE)] * 3, given_back)


def test_dtypes_that_are_not_added_up_are_refused(kind: type[PeerToPeer]) -> None:
    def task(transport: PeerToPeer, rank: int, stream: Stream) -> list[str | None]:
        dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
        return [transport.why_not(Transfer(8, 8, dtype, torch.device("cpu"))) for dtype in dtypes]

    reason = "torch.float64 is not added up; float16, bfloat16 and float32 are"
    assert Host(2, kind).run(task) == [[None, None, None, reason]] * 2


def test_what_a_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: True)
    monkeypatch.setattr(p2p_base.module, "why_unavailable", lambda: None)
    assert p2p_base._why_not_device(GPU) is None
    monkeypatch.setattr(p2p_base.module, "why_unavailable", lambda: "no compiler")
    assert p2p_base._why_not_device(GPU) == "no compiler"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    assert p2p_base._why_not_device(GPU) == "cuda:1 cannot read the memory of cuda:3"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert p2p_base._why_not_device(GPU) == "it is written for CUDA"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert p2p_base._why_not_device(GPU) == "NCCL_P2P_DISABLE=1 keeps GPUs from reading each other's memory"
    assert p2p_base._why_not_device(torch.device("cpu")) == "it is for GPUs, and tensors are on cpu"


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([("a", None)] * 8, None),
        ([("a", None)] * 9, "it sums over 8 ranks at most, got 9"),
        ([("a", None), ("b", None)], "its ranks are on 2 hosts, and GPUs read each other's memory within one"),
        ([("a", None), ("a", "no compiler")], "no compiler"),
    ],
    ids=["eight", "nine", "two-hosts", "one-lacks"],
)
def test_the_reason_of_any_rank_is_that_of_all(
    answers: list[tuple[str, str | None]], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p_base, "gather", lambda mine, group: answers)
    monkeypatch.setattr(p2p_base, "_why_not_device", lambda device: None)
    assert p2p_base._why_not_group(mock.Mock(), GPU) == reason
