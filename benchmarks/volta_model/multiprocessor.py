"""One multiprocessor with its resident CTAs, simulated from the first issue to the last."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .chip import V100, Chip
from .fetch import SharedInstructions
from .memory import GlobalMemory, SharedMemory
from .operation import Operation, Unit
from .scheduler import NEVER, Scheduler, Warp

_FORGET_EVERY = 4096  # events


@dataclass(frozen=True)
class Outcome:
    """What a simulation counted. Cycles of schedulers are the sum over all of them."""

    cycles: int  # until the last operation issued and no load is under way
    issued: int  # operations
    busy: Counter[Unit]  # cycles of schedulers
    lost: Counter[str]  # cycles of schedulers whose tensor cores are idle, by what the first warp to go on waits for
    shared_wavefronts: int  # cycles of the one shared memory
    global_bytes: int
    lines_fetched: int

    def __sub__(self, other: Outcome) -> Outcome:
        """What a longer simulation counted beyond a shorter one."""
        busy, lost = Counter(self.busy), Counter(self.lost)
        busy.subtract(other.busy)
        lost.subtract(other.lost)
        return Outcome(
            self.cycles - other.cycles,
            self.issued - other.issued,
            busy,
            lost,
            self.shared_wavefronts - other.shared_wavefronts,
            self.global_bytes - other.global_bytes,
            self.lines_fetched - other.lines_fetched,
        )


@dataclass
class _Barrier:
    """Of a CTA: those that wait, until all that still run have arrived."""

    running: int
    waiting: list[tuple[Scheduler, Warp]]
    latest: float = 0.0


class Multiprocessor:
    """Four schedulers, what they share, and the barriers of the CTAs."""

    def __init__(self, chip: Chip = V100) -> None:
        self._chip = chip
        self._shared = SharedMemory()
        self._global = GlobalMemory(chip)
        fetch = SharedInstructions(chip)
        self._schedulers = [Scheduler(chip, self._shared, self._global, fetch) for _ in range(chip.num_schedulers)]
        self._barriers: dict[int, _Barrier] = {}
        self._events: list[tuple[float, int]] = []
        self._asleep_since: dict[int, float] = {}
        self._end = 0.0

    def run(self, ctas: Sequence[Sequence[list[Operation]]], starts: Sequence[int] | None = None) -> Outcome:
        """Simulates CTAs, each a path for every warp of it, that begin together or at the cycles `starts`."""
        for cta, paths in enumerate(ctas):
            self._barriers[cta] = _Barrier(len(paths), [])
            for number, path in enumerate(paths):
                scheduler = self._schedulers[number % self._chip.num_schedulers]
                scheduler.add(Warp(number, cta, path), 0.0 if starts is None else starts[cta])
        self._events = [(0.0, index) for index in range(len(self._schedulers))]
        steps = 0
        while self._events:
            now, index = heapq.heappop(self._events)
            self._step(now, index)
            steps += 1
            if steps % _FORGET_EVERY == 0:
                self._shared.forget(int(now))
        return self._outcome()

    def _step(self, now: float, index: int) -> None:
        scheduler = self._schedulers[index]
        if not scheduler.warps:
            return
        warp, time, reason = scheduler.choose(now)
        if warp is None:
            if time == NEVER:
                self._asleep_since[index] = now
                return
            scheduler.wait(now, time, reason)
            heapq.heappush(self._events, (time, index))
            return
        operation = warp.path[warp.position]
        scheduler.issue(warp, now)
        self._end = max(self._end, now + 1, *warp.scoreboards) if warp.finished else self._end
        if operation.is_barrier and not warp.finished:
            self._arrive(scheduler, warp, now)
        elif warp.finished:
            self._leave(warp, now)
        heapq.heappush(self._events, (now + 1, index))

    def _arrive(self, scheduler: Scheduler, warp: Warp, now: float) -> None:
        barrier = self._barriers[warp.cta]
        barrier.waiting.append((scheduler, warp))
        barrier.latest = max(now, warp.ready - self._chip.barrier_latency)
        warp.ready, warp.reason = NEVER, "barrier"
        self._open(barrier, now)

    def _leave(self, warp: Warp, now: float) -> None:
        barrier = self._barriers[warp.cta]
        barrier.running -= 1
        self._open(barrier, now)

    def _open(self, barrier: _Barrier, now: float) -> None:
        """Lets all go on when the last has arrived."""
        if not barrier.waiting or len(barrier.waiting) < barrier.running:
            return
        until = math.ceil(max(now, barrier.latest) + self._chip.barrier_latency)
        for scheduler, warp in barrier.waiting:
            warp.ready = until
            self._wake(scheduler, now)
        barrier.waiting = []
        barrier.latest = 0.0

    def _wake(self, scheduler: Scheduler, now: float) -> None:
        index = self._schedulers.index(scheduler)
        since = self._asleep_since.pop(index, None)
        if since is not None:
            scheduler.wait(since, now + 1, "barrier")
            heapq.heappush(self._events, (now + 1, index))

    def _outcome(self) -> Outcome:
        stuck = [warp for scheduler in self._schedulers for warp in scheduler.warps]
        if stuck:
            raise RuntimeError(f"{len(stuck)} warps wait at a barrier that nobody else reaches")
        return Outcome(
            cycles=math.ceil(self._end),
            issued=sum(scheduler.issued for scheduler in self._schedulers),
            busy=sum((scheduler.busy for scheduler in self._schedulers), Counter()),
            lost=sum((scheduler.lost for scheduler in self._schedulers), Counter()),
            shared_wavefronts=self._shared.wavefronts,
            global_bytes=self._global.bytes,
            lines_fetched=sum(scheduler.lines_fetched for scheduler in self._schedulers),
        )
