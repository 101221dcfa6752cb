"""One multiprocessor with its resident CTAs, simulated from the first issue to the last."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .chip import V100, Chip
from .fetch import SharedInstructions
from .memory import GlobalMemory, SharedMemory
from .operation import Operation, Unit
from .scheduler import NEVER, Scheduler, Warp

_FORGET_EVERY = 4096  # events


@dataclass(frozen=True)
class Outcome:
    """The counts of a simulation. Cycles of schedulers are the sum over all of them."""

    cycles: int  # until the last operation issued and no load is under way
    issued: int  # operations
    busy: Mapping[Unit, float]  # cycles of schedulers
    lost: Counter[str]  # cycles of schedulers whose tensor cores are idle, by what the next warp to go on waits for
    shared_wavefronts: int  # cycles of the one shared memory
    global_bytes: int
    lines_fetched: int

    def __sub__(self, other: Outcome) -> Outcome:
        """The counts of a longer simulation beyond those of a shorter one."""
        busy = {unit: cycles - other.busy[unit] for unit, cycles in self.busy.items()}
        lost = Counter(self.lost)
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
    """The barrier of a CTA: warps that wait until all running warps have arrived."""

    running: int
    # Scheduler, warp, when it could go on without the barrier, and what it waits for until then.
    waiting: list[tuple[int, Warp, float, str]]


class Multiprocessor:
    """Four schedulers, the resources that they share, and the barriers of the CTAs.

    A scheduler acts at the cycle when it is due, or sooner when a barrier opens.
    """

    def __init__(self, chip: Chip = V100) -> None:
        self._chip = chip
        self._shared = SharedMemory()
        self._global = GlobalMemory(chip)
        fetch = SharedInstructions(chip)
        self._schedulers = [Scheduler(chip, self._shared, self._global, fetch) for _ in range(chip.num_schedulers)]
        self._barriers: dict[int, _Barrier] = {}
        self._events: list[tuple[float, int]] = []
        self._due = [NEVER] * chip.num_schedulers
        self._end = 0.0

    def run(self, ctas: Sequence[Sequence[list[Operation]]]) -> Outcome:
        """Simulates CTAs that begin together, each a path for every warp of it."""
        for cta, paths in enumerate(ctas):
            self._barriers[cta] = _Barrier(len(paths), [])
            for number, path in enumerate(paths):
                self._schedulers[number % self._chip.num_schedulers].add(Warp(cta, path), 0.0)
        for index in range(len(self._schedulers)):
            self._schedule(index, 0.0)
        steps = 0
        while self._events:
            now, index = heapq.heappop(self._events)
            if now == self._due[index]:  # otherwise it has acted since
                self._step(now, index)
            steps += 1
            if steps % _FORGET_EVERY == 0:
                self._shared.forget(int(now))
        return self._outcome()

    def _schedule(self, index: int, time: float) -> None:
        """Sets the time at which a scheduler acts."""
        self._due[index] = time
        if time < NEVER:
            heapq.heappush(self._events, (time, index))

    def _step(self, now: float, index: int) -> None:
        scheduler = self._schedulers[index]
        warp, time = scheduler.choose(now)
        self._schedule(index, time if warp is None else now + 1)
        if warp is None:
            return
        operation = warp.path[warp.position]
        scheduler.issue(warp, now)
        barrier = self._barriers[warp.cta]
        if warp.finished:
            self._end = max(self._end, now + 1, *warp.scoreboards)
            barrier.running -= 1
            self._open(barrier, now)
        elif operation.is_barrier:
            barrier.waiting.append((index, warp, warp.ready, warp.reason))
            warp.ready, warp.reason = NEVER, "barrier"
            self._open(barrier, now)

    def _open(self, barrier: _Barrier, now: float) -> None:
        """Lets all warps go on when the last has arrived."""
        if len(barrier.waiting) < barrier.running:
            return
        until = now + self._chip.barrier_latency
        for index, warp, ready, reason in barrier.waiting:
            warp.ready, warp.reason = max((until, "barrier"), (ready, reason))
            if warp.ready < self._due[index]:
                self._schedule(index, warp.ready)
        barrier.waiting = []

    def _outcome(self) -> Outcome:
        stuck = [warp for scheduler in self._schedulers for warp in scheduler.warps]
        if stuck:
            raise RuntimeError(f"{len(stuck)} warps wait at a barrier that nobody else reaches")
        return Outcome(
            cycles=math.ceil(self._end),
            issued=sum(scheduler.issued for scheduler in self._schedulers),
            busy={unit: sum(scheduler.busy[unit] for scheduler in self._schedulers) for unit in Unit},
            lost=sum((scheduler.lost for scheduler in self._schedulers), Counter()),
            shared_wavefronts=self._shared.wavefronts,
            global_bytes=self._global.bytes,
            lines_fetched=sum(scheduler.lines_fetched for scheduler in self._schedulers),
        )
