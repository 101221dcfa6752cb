"""copy_engine: sums through memory that peers read, moved by the GPUs' copy engines.

NCCL's all-reduce takes tens of CTAs, and the matrix products beside it miss them. Here only the additions take any: for
each block of rows every rank, by the peers' memory that torch's symmetric memory maps,

    copies its share of the rows from every peer, adds them up, and copies from every peer what that one added up.

Shares are even, and rank r begins with what rank r + 1 has, so that every link carries one copy at a time. Every rank
gets the same bits, since each number is added up once, in the order of the ranks. NVLink's multicast is not used.
"""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention import config
from fastattention.backends.cuda import summing
from fastattention.backends.cuda.jit import module
from fastattention.backends.cuda.params import MOST_PARTS
from fastattention.distributed.exchange import gather
from fastattention.distributed.transports.base import Pending, Transfer, Transport
from fastattention.errors import ArgumentError

GRANULE = 2 << 20  # bytes of which memory is taken a multiple
ALIGNMENT = 16  # bytes at which shares begin
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CopyEngine(Transport):
    """Between GPUs of one host that can read each other's memory.

    It keeps twice the bytes of the largest call that it has served.
    """

    name = "copy_engine"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group_name = group.group_name
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._device = device
        self._reason = _why_not_group(group, device)
        self._shared: _Shared | None = None
        self._parts = torch.empty(0, dtype=torch.uint8, device=device)  # of this rank's share, one from each rank
        self._end = 0  # where the rows of the call under way end
        if self._reason is None:
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def why_not(self, transfer: Transfer) -> str | None:
        """Of the group, the same for every transfer; or its dtype."""
        if self._reason is None and transfer.dtype not in DTYPES:
            return f"{transfer.dtype} is not added up; float16, bfloat16 and float32 are"
        return self._reason

    def partials(self, out: Tensor) -> Tensor:
        """Rows that peers can read."""
        if self._shared is None or self._shared.nbytes < out.nbytes:
            _check_not_capturing()
            torch.cuda.synchronize(self._device)  # nobody uses the old memory any more
            self._shared = None
            self._shared = _Shared.make(-(-out.nbytes // GRANULE) * GRANULE, self._device, self._group_name)
        self._end = out.data_ptr() + out.nbytes
        return self._shared.mine[: out.nbytes].view(out.dtype).view(out.shape)

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """On a stream of its own."""
        assert self._shared is not None
        share = -(-out.nbytes // (self._size * ALIGNMENT)) * ALIGNMENT
        self._take_parts(share)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._shared.meet()
            self._add_up(partial, out, share)
            self._shared.meet()
            self._collect(partial, out, share)
            if out.data_ptr() + out.nbytes == self._end:
                self._shared.meet()  # the next call writes what peers read in this one
        return _Sum(self._stream.record_event(), out)

    def close(self) -> None:
        """Gives the memory back."""
        self._shared = None
        self._parts = self._parts[:0].clone()

    def _take_parts(self, share: int) -> None:
        if self._parts.nbytes < self._size * share:
            _check_not_capturing()
            with torch.cuda.stream(self._stream):
                self._parts = self._parts.new_empty(self._size * share)

    def _add_up(self, partial: Tensor, out: Tensor, share: int) -> None:
        """This rank's share, where its own part was and in `out`."""
        assert self._shared is not None
        begin, nbytes = self._share_of(self._rank, out, share)
        if not nbytes:
            return
        at = partial.data_ptr() - self._shared.addresses[self._rank] + begin
        own = self._shared.addresses[self._rank] + at
        parts = [self._parts.data_ptr() + rank * share for rank in range(self._size)]
        parts[self._rank] = own
        for rank in self._in_turn():
            self._copy(parts[rank], self._shared.addresses[rank] + at, nbytes)
        count, index, stream = nbytes // out.itemsize, self._device.index, self._stream.cuda_stream
        summing.sum_parts(parts, own, out.data_ptr() + begin, count, out.dtype, index, stream)

    def _collect(self, partial: Tensor, out: Tensor, share: int) -> None:
        """The other shares, each from the rank that added it up."""
        assert self._shared is not None
        offset = partial.data_ptr() - self._shared.addresses[self._rank]
        for rank in self._in_turn():
            begin, nbytes = self._share_of(rank, out, share)
            if nbytes:
                self._copy(out.data_ptr() + begin, self._shared.addresses[rank] + offset + begin, nbytes)

    def _share_of(self, rank: int, out: Tensor, share: int) -> tuple[int, int]:
        """Where a rank's share begins, and its bytes."""
        begin = min(rank * share, out.nbytes)
        return begin, min(share, out.nbytes - begin)

    def _in_turn(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        module.copy_async(target, source, nbytes, self._stream.cuda_stream)


class _Shared(NamedTuple):
    """Memory of this rank that all ranks read, and theirs."""

    mine: Tensor  # uint8
    handle: Any
    addresses: tuple[int, ...]  # of each rank's, in this process

    @property
    def nbytes(self) -> int:
        return self.mine.nbytes

    @staticmethod
    def make(nbytes: int, device: torch.device, group_name: Any) -> _Shared:
        """Collective."""
        from torch.distributed import _symmetric_memory

        mine = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        handle = _symmetric_memory.rendezvous(mine, group_name)
        return _Shared(mine, handle, tuple(handle.buffer_ptrs))

    def meet(self) -> None:
        """All ranks' current streams come here before any goes on."""
        self.handle.barrier(channel=0)


class _Sum(Pending):
    def __init__(self, end: torch.cuda.Event, rows: Tensor) -> None:
        self._end = end
        self._rows = rows

    def wait(self) -> None:
        torch.cuda.current_stream(self._rows.device).wait_event(self._end)


def _check_not_capturing() -> None:
    if torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "memory that peers read cannot be made while a CUDA graph is captured: make the largest call once before"
        )


def _why_not_group(group: ProcessGroup, device: torch.device) -> str | None:
    """The first reason that any rank has. Collective."""
    answers = gather((socket.gethostname(), _why_not_device(device)), group)
    reasons = [reason for _, reason in answers if reason is not None]
    if reasons:
        return str(reasons[0])
    hosts = {host for host, _ in answers}
    if len(hosts) > 1:
        return f"its ranks are on {len(hosts)} hosts, and GPUs read each other's memory within one"
    return f"it adds up {MOST_PARTS} parts at most, of {len(answers)} ranks" if len(answers) > MOST_PARTS else None


def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it copies between GPUs, and tensors are on {device.type}"
    if config.peer_to_peer_disabled():
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
