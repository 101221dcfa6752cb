"""Discrete events on one AI Core: pipes that run one operation at a time, and buffers that are reused."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


class Event(NamedTuple):
    """One thing that a pipe did. Times are cycles since the row block began."""

    unit: str  # "Cube", "Vector 0", "Vector 1"
    pipe: str  # "MTE2", "MTE1", "M", "FIX"; "MTE2", "V", "MTE3"
    stage: str  # "QK", "softmax", "PV", "O update", "flag", ...
    tile: int  # which score tile of the row block
    ready: float  # when its inputs were there and its buffer free
    start: float
    end: float


class Held(NamedTuple):
    """One use of a buffer."""

    slot: int
    start: float
    end: float


class Pipe:
    """Takes operations in the order in which they are issued, one at a time."""

    def __init__(self, unit: str, name: str, events: list[Event]) -> None:
        self.unit = unit
        self.name = name
        self.free = 0.0
        self.busy = 0.0
        self._events = events

    def run(self, stage: str, tile: int, cycles: float, *after: float) -> float:
        """Do something as soon as everything in `after` has happened; returns when it ends."""
        ready = max(after, default=0.0)
        start = max(self.free, ready)
        self.free = start + cycles
        self.busy += cycles
        self._events.append(Event(self.unit, self.name, stage, tile, ready, start, self.free))
        return self.free


@dataclass
class _Slot:
    index: int
    free: float = 0.0
    taken: float = 0.0


class Buffer:
    """So many slots, used in turn. Whoever fills one waits until its last user has released it."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self.num_slots = num_slots
        self.held: list[Held] = []
        self._free = deque(_Slot(index) for index in range(num_slots))
        self._taken: deque[_Slot] = deque()

    def available(self) -> float:
        """When the next slot is free. Every slot but the last num_slots taken must have been released."""
        return self._free[0].free

    def take(self, start: float) -> None:
        """The next slot is filled from `start` on."""
        slot = self._free.popleft()
        slot.taken = start
        self._taken.append(slot)

    def release(self, end: float) -> None:
        """The slot that was taken first is no longer needed at `end`."""
        slot = self._taken.popleft()
        self.held.append(Held(slot.index, slot.taken, end))
        slot.free = end
        self._free.append(slot)
