"""The base of transports through memory that the GPUs of one host read from each other."""

from __future__ import annotations

import abc
import socket

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fastattention import environment
from fastattention.distributed.object_collectives import gather
from fastattention.distributed.transports.all_reduce import DTYPES, MOST_RANKS
from fastattention.distributed.transports.base import Transfer, Transport
from fastattention.errors import ArgumentError
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.peer_memory import PeerMemory


class PeerToPeer(Transport):
    """Sums partial results in PeerMemory, which grows to the largest call and is kept, as is memory that graphs use."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group_name = group.group_name
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._reason = _why_not_group(group, device)
        self._peers: PeerMemory | None = None
        self._last: torch.cuda.Stream | None = None  # stream of the previous call
        self._is_captured = False  # whether the current call is captured
        self._in_graphs: set[PeerMemory] = set()  # memory that graphs need, even if larger memory has replaced it

    def why_not(self, transfer: Transfer) -> str | None:
        """The reason of the group, the same for every transfer; or that of the dtype."""
        if self._reason is None and transfer.dtype not in DTYPES:
            return f"{transfer.dtype} is not added up; float16, bfloat16 and float32 are"
        return self._reason

    def reserve(self, nbytes: int) -> None:
        """Provides at least `nbytes` bytes that peers can read. Larger memory replaces smaller."""
        if self._peers is None or self._peers.nbytes < nbytes:
            if torch.cuda.is_current_stream_capturing():
                raise ArgumentError(
                    "memory that peers read cannot be made while a CUDA graph is captured: make the largest call once "
                    "before"
                )
            self.release()
            self._peers = self._take(nbytes)

    @abc.abstractmethod
    def _take(self, nbytes: int) -> PeerMemory:
        """Takes memory for a call, and the flags that its sums need. Collective."""

    def _begin(self, nbytes: int) -> PeerMemory:
        """The memory of a call on the current stream, which waits for the previous call: all use one memory."""
        self._is_captured = torch.cuda.is_current_stream_capturing()
        # The user orders replays of graphs.
        if not self._is_captured and (
            self._last is None or self._last.cuda_stream != module.current_stream(self._device.index)
        ):
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_stream(self._last)
            self._last = stream
        self.reserve(nbytes)
        assert self._peers is not None
        if self._is_captured:
            self._in_graphs.add(self._peers)
        return self._peers

    def release(self) -> None:
        """Frees the memory that peers read."""
        if self._peers is not None:
            torch.cuda.synchronize(self._device)  # the old memory is no longer in use
            self._peers = None

    def close(self) -> None:
        """Frees all memory."""
        self._in_graphs.clear()
        self.release()


def _why_not_group(group: ProcessGroup, device: torch.device) -> str | None:
    """The first reason of any rank against the group. Collective."""
    answers = gather((socket.gethostname(), _why_not_device(device)), group)
    reasons = [reason for _, reason in answers if reason is not None]
    if reasons:
        return str(reasons[0])
    hosts = {host for host, _ in answers}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts, and GPUs read each other's memory within one"
    return f"it sums over {MOST_RANKS} ranks at most, got {len(answers)}" if len(answers) > MOST_RANKS else None


def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it is for GPUs, and tensors are on {device.type}"
    if environment.peer_to_peer_disabled():
        return "NCCL_P2P_DISABLE=1 keeps GPUs from reading each other's memory"
    if torch.version.hip is not None:
        return "it is written for CUDA"
    unreachable = [
        other
        for other in range(torch.cuda.device_count())
        if other != device.index and not torch.cuda.can_device_access_peer(device, other)
    ]
    if unreachable:
        return f"{device} cannot read the memory of cuda:{unreachable[0]}"
    return module.why_unavailable()
