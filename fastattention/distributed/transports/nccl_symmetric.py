"""nccl_symmetric: NCCL's kernels for symmetric memory, which take a few CTAs where a ring takes tens.

NCCL uses them for whatever lies in a registered pool, and else falls back without a word; so rows are summed in memory
of such a pool and then copied. With NVLink's multicast off two of its algorithms remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention import config
from fastattention.distributed.transports.base import Pending, Room, Transfer
from fastattention.distributed.transports.c10d import C10d
from fastattention.errors import ArgumentError

LEAST_NCCL = (2, 27)  # the first that has them
ALIGNMENT = 16


class NcclSymmetric(C10d):
    """It keeps as many bytes as the largest call that it has served has, and all that CUDA graphs use."""

    name = "nccl_symmetric"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._device = device
        self._reason = _why_not_group(group, device)
        self._pool: Any = None
        self._rows = torch.empty(0, dtype=torch.uint8, device=device)
        self._in_graphs: dict[Any, Tensor] = {}  # pools, and their rows, though larger may have taken their place
        if self._reason is None:
            super().__init__(group, device)
            self.rooms = (Room(),)  # its kernels take a few CTAs
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def why_not(self, transfer: Transfer) -> str | None:
        """Of the group, the same for every transfer; or its rows, at which blocks begin."""
        row_bytes = transfer.hidden * transfer.dtype.itemsize
        if self._reason is None and row_bytes % ALIGNMENT:
            return f"rows of {row_bytes} bytes; its kernels sum wrongly what is not aligned to {ALIGNMENT}"
        return self._reason

    def begin(self, out: Tensor, rows: Sequence[int], room: int = 0) -> Tensor:
        """Rows in the pool."""
        capturing = torch.cuda.is_current_stream_capturing()
        if self._rows.nbytes < out.nbytes:
            if capturing:
                raise ArgumentError(
                    "a pool cannot grow while a CUDA graph is captured: make the largest call once before"
                )
            self._grow(out.nbytes)
        if capturing:
            self._in_graphs[self._pool] = self._rows
        return self._rows[: out.nbytes].view(out.dtype).view(out.shape)

    def reserve(self, nbytes: int, largest_block: int) -> None:
        """A pool that is large enough."""
        if self._rows.nbytes < nbytes:
            self._grow(nbytes)

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """On the communicator's stream; the copy follows on another."""
        work = self._begin(partial, partial, asynchronous=True)
        with torch.cuda.stream(self._stream):
            work.wait()
            out.copy_(partial)
        return _Copied(self._stream.record_event(), out)

    def all_reduce_now(self, partial: Tensor, out: Tensor) -> None:
        """On the current stream."""
        super().all_reduce_now(partial, partial)
        out.copy_(partial)

    def release(self) -> None:
        """Gives back the pool."""
        if self._pool is None:
            return
        torch.cuda.synchronize(self._device)
        if self._pool not in self._in_graphs:
            self._communicator.deregister_mem_pool(self._pool)
        self._rows, self._pool = self._rows[:0].clone(), None

    def close(self) -> None:
        """Ends the communicator, after its pools."""
        self.release()
        for pool in self._in_graphs:
            self._communicator.deregister_mem_pool(pool)
        self._in_graphs.clear()
        if self._reason is None:
            super().close()

    def _grow(self, nbytes: int) -> None:
        """Another pool. Collective: all ranks register theirs."""
        torch.cuda.synchronize(self._device)
        if self._pool is None:  # a communicator is made at its first sum, and pools are registered with one
            super().all_reduce_now(*[torch.zeros(1, dtype=torch.float32, device=self._device)] * 2)
        self.release()
        self._pool = torch.cuda.MemPool(self._communicator.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool, self._device):
            self._rows = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        self._communicator.register_mem_pool(self._pool, symm=True)


class _Copied(Pending):
    def __init__(self, end: torch.cuda.Event, rows: Tensor) -> None:
        self._end = end
        self._rows = rows

    def wait(self) -> None:
        torch.cuda.current_stream(self._rows.device).wait_event(self._end)


def _why_not_group(group: ProcessGroup, device: torch.device) -> str | None:
    if device.type != "cuda" or group._get_backend(device).name() != "nccl":
        return f"it is NCCL's, and the group has {group._get_backend(device).name()} for tensors on {device.type}"
    if config.peer_to_peer_disabled():
        return "NCCL_P2P_DISABLE=1 keeps GPUs from reading each other's memory, and it would do so all the same"
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < LEAST_NCCL:
        return f"NCCL {'.'.join(map(str, version))} has no symmetric memory; 2.27 and newer have"
    backend = dist.ProcessGroupNCCL
    if not (hasattr(backend, "register_mem_pool") and hasattr(torch.cuda, "MemPool")):
        return f"torch {torch.__version__} cannot register memory with NCCL"
    return None
