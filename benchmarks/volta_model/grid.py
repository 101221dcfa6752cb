"""All CTAs of a grid on all SMs: waves, their tail, and CTAs of unequal length."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

_TOGETHER = 1.0  # cycles; CTAs that end within this time count as ending together


@dataclass(frozen=True)
class Pace:
    """The pace of a CTA for a number of resident CTAs, in cycles."""

    overhead: float  # before the loop, after it, and in tiles that are masked
    tile: float


@dataclass(eq=False)
class _Sm:
    """The remaining work of the CTAs of an SM: the overhead, from 1 to 0, and tiles."""

    now: float = 0.0
    left: list[list[float]] = field(default_factory=list)

    def pace(self, paces: Sequence[Pace]) -> Pace:
        return paces[len(self.left) - 1]

    def next_end(self, paces: Sequence[Pace]) -> float:
        """When the first of its CTAs ends if no other comes."""
        pace = self.pace(paces)
        return self.now + min(overhead * pace.overhead + tiles * pace.tile for overhead, tiles in self.left)

    def advance(self, until: float, paces: Sequence[Pace]) -> None:
        """Lets all CTAs work until then, and removes those that are done."""
        pace, time = self.pace(paces), until - self.now
        for left in self.left:
            overhead = min(left[0] * pace.overhead, time)
            left[0] -= overhead / pace.overhead
            left[1] -= (time - overhead) / pace.tile
        self.left = [left for left in self.left if left[0] * pace.overhead + left[1] * pace.tile > _TOGETHER]
        self.now = until


def grid_cycles(tiles: Iterable[int], num_sms: int, paces: Sequence[Pace]) -> float:
    """Cycles until the last CTA ends.

    tiles: tiles of keys of each CTA at the pace of a tile, in the order in which CTAs start. Each goes to the SM with
        the fewest CTAs, as soon as one has room.
    paces: pace of a CTA on an SM that holds 1, 2, ... of them, up to as many as fit.
    """
    waiting = iter(tiles)
    sms = [_Sm() for _ in range(num_sms)]
    events: list[tuple[float, int]] = []
    changed, now = set(range(num_sms)), 0.0
    while True:
        changed |= _start(waiting, sms, len(paces), changed)
        for index in changed:
            if sms[index].left:
                heapq.heappush(events, (sms[index].next_end(paces), index))
        if not events:
            return now
        now, changed = events[0][0], set()
        while events and events[0][0] <= now + _TOGETHER:
            index = heapq.heappop(events)[1]
            sms[index].advance(now, paces)
            changed.add(index)


def _start(waiting: Iterator[int], sms: Sequence[_Sm], most: int, free: Iterable[int]) -> set[int]:
    """Starts CTAs on the SMs where one has ended."""
    places = sorted(
        (len(sms[index].left) + more, index) for index in free for more in range(most - len(sms[index].left))
    )
    started = set()
    for (_, index), number in zip(places, waiting, strict=False):
        sms[index].left.append([1.0, float(number)])
        started.add(index)
    return started
