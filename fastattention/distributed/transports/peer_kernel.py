"""peer_kernel: a call is computed as a whole, then one kernel sums it in memory that all GPUs of the host read.

It is for calls too short to overlap anything. NVLink's multicast is not used.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.backends.common.c_struct import Params
from fastattention.distributed.object_collectives import gather, timeout_of
from fastattention.distributed.transports.all_reduce import (
    AllReduceConfig,
    FlagLayout,
    choose_config,
    ctas_for,
    make_params,
)
from fastattention.distributed.transports.base import Compute, Transfer
from fastattention.distributed.transports.p2p_base import PeerToPeer
from fastattention.engine.bounded import BoundedDict
from fastattention.gpu_runtime import module
from fastattention.gpu_runtime.module import Function
from fastattention.gpu_runtime.peer_memory import PeerMemory

# Through registers a multiprocessor reads some 10 GB/s from its peers, by bulk copies 40.
CTAS, BULK_CTAS = 64, 16
LONGEST_TIMEOUT = 1e9  # seconds, whose nanoseconds fit 64 bits
ONE_SHOT_BYTES = 256 << 10  # up to this size every rank adds up all rows
MOST_PREPARED = 256


class PeerKernel(PeerToPeer):
    """A transport between GPUs of one host that can read each other's memory.

    A rank that waits for another longer than the timeout of the group ends with an error of CUDA. It keeps the bytes of
    the largest call that it has served, and what CUDA graphs use.
    """

    name = "peer_kernel"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._prepared: BoundedDict[tuple[int, torch.dtype], _Launch] = BoundedDict(MOST_PREPARED)
        if self._reason is None:
            seconds = timeout_of(group._get_backend(device)).total_seconds()
            self._timeout = round(min(seconds, LONGEST_TIMEOUT) * 1e9)  # nanoseconds
            mine = choose_config(torch.float32, self._size, module.device_limits(device.index)).bulk_copies
            self._bulk_copies = all(gather(mine, group))  # CTAs with one index take the same packets on all ranks

    def why_not(self, transfer: Transfer) -> str | None:
        """The reason of the group or the dtype, or that several blocks are asked for."""
        if self._reason is None and transfer.num_blocks > 1:
            return f"it sums a call as a whole, and the partition has {transfer.num_blocks} blocks"
        return super().why_not(transfer)

    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        """Computes, then sums, both on the current stream."""
        memory = self._begin(out.nbytes)
        [count] = rows
        compute(0, count, memory.like(out))
        function, params = self._prepared.get((out.numel(), out.dtype)) or self._prepare(memory, out)
        params.out = out.data_ptr()
        function.launch(params, params.num_ctas, module.current_stream(self._device.index))

    def _prepare(self, memory: PeerMemory, out: Tensor) -> _Launch:
        """The launch for calls of a size, which is cached because making it takes longer than launching."""
        one_shot = out.nbytes <= ONE_SHOT_BYTES
        num_ctas = ctas_for(out.nbytes, self._size, BULK_CTAS if self._bulk_copies else CTAS, one_shot)
        flags = tuple(memory.flag(rank, 0) for rank in range(self._size))
        parts = tuple(memory.addresses)
        params = make_params(parts, flags, self._rank, out.numel(), num_ctas, self._timeout, one_shot)
        config = AllReduceConfig(out.dtype, self._size, self._bulk_copies)
        [function] = module.load_kernel(config, self._device.index).functions
        made = self._prepared[out.numel(), out.dtype] = _Launch(function, params)
        return made

    def _take(self, nbytes: int) -> PeerMemory:
        return PeerMemory(nbytes, FlagLayout.COUNT, self._device, self._group_name)

    def release(self) -> None:
        """Frees the memory that peers read, and forgets its addresses."""
        super().release()
        self._prepared.clear()


class _Launch(NamedTuple):
    """A launch, except for the address of the result, which is written to `params`."""

    function: Function
    params: Params
