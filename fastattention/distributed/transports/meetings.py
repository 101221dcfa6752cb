"""Where the ranks of copy_engine meet in a sum: by flags for which streams wait."""

from __future__ import annotations

import enum

from fastattention.gpu_runtime.peer_memory import PeerMemory
from fastattention.gpu_runtime.streams import Meeting


class Point(enum.IntEnum):
    """In turns for two blocks, and after the last block of a call."""

    COMPUTED = 0  # its parts have been computed
    ADDED_UP = 2
    READ = 4  # nobody reads what this call has written any more


NUM_MEETINGS = 5


class Meetings:
    """Those of one rank, by flags of some memory: `flags_needed` of it."""

    def __init__(self, memory: PeerMemory, rank: int, size: int) -> None:
        def made(kind: int) -> Meeting:
            others = [(rank + step) % size for step in range(1, size)]
            return Meeting(
                [memory.flag(rank, kind * size + other) for other in others],
                [memory.flag(other, kind * size + rank) for other in others],
            )

        self._meetings = [made(kind) for kind in range(NUM_MEETINGS)]

    @staticmethod
    def flags_needed(size: int) -> int:
        """Of every rank, among so many."""
        return NUM_MEETINGS * size

    def meet(self, point: Point, turn: int, stream: int) -> None:
        """All ranks' streams come here before any goes on. turn: 0 and 1 alternate from block to block of a call."""
        self._meetings[point + (0 if point is Point.READ else turn)].enqueue(stream)
