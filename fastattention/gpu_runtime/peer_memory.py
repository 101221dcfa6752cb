"""Memory of every rank that all ranks of a host read, by torch's symmetric memory, and flags in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GRANULE = 2 << 20  # memory is allocated in multiples of this many bytes
FLAG_BYTES = 4


class PeerMemory:
    """`nbytes` bytes on every rank, followed by 32-bit flags, which are 0 at first."""

    def __init__(self, nbytes: int, num_flags: int, device: torch.device, group_name: Any) -> None:
        """Allocates the memory. Collective."""
        from torch.distributed import _symmetric_memory

        self.nbytes = -(-nbytes // GRANULE) * GRANULE
        memory = _symmetric_memory.empty(self.nbytes + num_flags * FLAG_BYTES, dtype=torch.uint8, device=device)
        memory[self.nbytes :].zero_()
        torch.cuda.synchronize(device)
        self._handle = _symmetric_memory.rendezvous(memory, group_name)  # returns when all ranks are here
        self.mine: Tensor = memory[: self.nbytes]
        # The last view: making one takes longer than launching a kernel.
        self._place: tuple[torch.dtype, torch.Size, bool] | None = None
        self._view = self.mine
        self.addresses: Sequence[int] = list(self._handle.buffer_ptrs)

    def like(self, out: Tensor) -> Tensor:
        """A view of this rank's first bytes with the shape and dtype of `out`."""
        # A view made in inference mode cannot be written outside of it.
        place = (out.dtype, out.shape, torch.is_inference_mode_enabled())
        if place != self._place:
            self._place, self._view = place, self.mine[: out.nbytes].view(out.dtype).view(out.shape)
        return self._view

    def flag(self, rank: int, number: int) -> int:
        """The address of flag `number` of a rank."""
        return self.addresses[rank] + self.nbytes + number * FLAG_BYTES
