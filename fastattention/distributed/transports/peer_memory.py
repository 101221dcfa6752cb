"""Memory of every rank that all ranks of a host read, by torch's symmetric memory, and where they meet."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattention.backends.cuda.jit.streams import Meeting

GRANULE = 2 << 20  # bytes of which memory is taken a multiple
FLAG_BYTES = 4


class Point(enum.IntEnum):
    """Where the ranks meet in a sum, in turns for two blocks, and after the last block of a call."""

    COMPUTED = 0  # its parts have been computed
    ADDED_UP = 2
    READ = 4  # nobody reads what this call has written any more


NUM_MEETINGS = 5


class PeerMemory:
    """As many bytes on every rank, and flags behind them."""

    def __init__(self, nbytes: int, rank: int, size: int, device: torch.device, group_name: Any) -> None:
        """Collective."""
        from torch.distributed import _symmetric_memory

        self.nbytes = -(-nbytes // GRANULE) * GRANULE
        flags = NUM_MEETINGS * size * FLAG_BYTES
        memory = _symmetric_memory.empty(self.nbytes + flags, dtype=torch.uint8, device=device)
        memory[self.nbytes :].zero_()
        torch.cuda.synchronize(device)
        self._handle = _symmetric_memory.rendezvous(memory, group_name)  # returns when all ranks are here
        self.mine: Tensor = memory[: self.nbytes]
        self.addresses: Sequence[int] = list(self._handle.buffer_ptrs)
        self._meetings = [self._meeting(kind, rank, size) for kind in range(NUM_MEETINGS)]

    def meet(self, point: Point, turn: int, stream: int) -> None:
        """All ranks' streams come here before any goes on. turn: 0 and 1 alternate from block to block of a call."""
        self._meetings[point + (0 if point is Point.READ else turn)].enqueue(stream)

    def _meeting(self, kind: int, rank: int, size: int) -> Meeting:
        def flag(at: int, raised_by: int) -> int:
            return self.addresses[at] + self.nbytes + (kind * size + raised_by) * FLAG_BYTES

        others = [(rank + step) % size for step in range(1, size)]
        return Meeting([flag(rank, other) for other in others], [flag(other, rank) for other in others])
