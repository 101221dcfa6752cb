"""One of a multiprocessor's four schedulers with its warps, its units and its queue to shared resources."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from .chip import Chip
from .fetch import Instructions, SharedInstructions
from .memory import GlobalMemory, SharedMemory
from .operation import Operation, Unit

NEVER = math.inf
_QUEUED = frozenset({Unit.SPECIAL, Unit.SHARED, Unit.GLOBAL, Unit.LOCAL, Unit.CONSTANT})


@dataclass(eq=False, slots=True)
class Warp:
    """A warp on its way through its operations."""

    cta: int
    path: list[Operation]
    position: int = 0
    ready: float = 0.0  # when the next operation may issue, units aside; NEVER at a barrier and after the last one
    reason: str = "stall counts"  # reason of the wait until then
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 6)
    waits_for: list[str] = field(default_factory=lambda: [""] * 6)  # what will release each scoreboard
    yielded: bool = False

    @property
    def finished(self) -> bool:
        """Whether it has executed everything."""
        return self.position >= len(self.path)


class Scheduler:
    """Issues at most one operation a cycle, in order within a warp.

    It stays with a warp while that can issue and does not yield, then takes the youngest that can (Huerta et al.).
    """

    def __init__(
        self, chip: Chip, shared: SharedMemory, global_memory: GlobalMemory, instructions: SharedInstructions
    ) -> None:
        self._chip = chip
        self._shared = shared
        self._global = global_memory
        self._instructions = Instructions(chip, instructions)
        self._unit_free = [0.0] * len(Unit)
        self._queue: deque[float] = deque()  # when operations leave the queue
        self._way_free = 0.0  # the path from the queue to memory
        self._last: Warp | None = None
        self._idle: tuple[float, str] | None = None  # idle since when, and why
        self.warps: list[Warp] = []
        self.busy = dict.fromkeys(Unit, 0.0)  # cycles
        self.lost: Counter[str] = Counter()  # cycles in which the tensor cores are idle, by reason
        self.issued = 0

    def add(self, warp: Warp, now: float) -> None:
        """A new warp; the last that was added is the youngest."""
        warp.ready = self._instructions.enter(warp.path[0].line, now)
        self.warps.append(warp)

    def choose(self, now: float) -> tuple[Warp | None, float]:
        """The warp that issues now, or None with when the next one can if no barrier opens before."""
        self._count_idle(now)
        best: Warp | None = None
        soonest, reason = NEVER, "barrier"
        for warp in self.warps:
            if warp.ready > now:
                time, why = warp.ready, warp.reason
            else:
                time, why = self._unit_ready(warp.path[warp.position], now)
                if time <= now:
                    if warp is self._last and not warp.yielded:
                        return warp, now
                    if best is None or best.yielded or not warp.yielded:
                        best = warp
                    continue
            if time < soonest:
                soonest, reason = time, why
        if best is None and self.warps:
            self._idle = now, reason
        return best, soonest

    def _count_idle(self, now: float) -> None:
        """Counts idle cycles since the scheduler last found nothing to issue."""
        if self._idle is not None:
            since, reason = self._idle
            self._idle = None
            self._count_lost(since, now, reason)

    def _count_lost(self, since: float, until: float, reason: str) -> None:
        """Counts those of some cycles in which the tensor cores idle."""
        idle = until - max(since, math.floor(self._unit_free[Unit.TENSOR]))
        if idle > 0:
            self.lost[reason] += int(idle)

    def _unit_ready(self, operation: Operation, now: float) -> tuple[float, str]:
        """When a unit, or the queue to it, takes an operation."""
        unit = operation.unit
        if unit in _QUEUED:
            while self._queue and self._queue[0] <= now:
                self._queue.popleft()
            if len(self._queue) < self._chip.queue_length:
                return now, ""
            return self._queue[0], "memory queue"
        # A unit keeps fractions of a cycle. If it becomes free before the cycle ends, it counts as free.
        free = self._unit_free[unit]
        return (now, "") if free < now + 1 else (math.floor(free), f"{unit.name.lower()} unit")

    def issue(self, warp: Warp, now: float) -> None:
        """Issues one operation of a warp."""
        operation = warp.path[warp.position]
        unit = operation.unit
        if unit is not Unit.TENSOR:
            self._count_lost(now, now + 1, "other instructions")
        if self._last is not None and self._last is not warp:
            self._last.yielded = False
        self._last = warp
        warp.yielded = operation.yields
        self.issued += 1
        if unit in _QUEUED:
            self._enqueue(warp, operation, now)
        elif unit is not Unit.NONE:
            self._unit_free[unit] = max(self._unit_free[unit], now) + operation.interval
            self.busy[unit] += operation.interval
        if unit is Unit.NONE and operation.write_barrier is not None:
            self._hold(warp, operation.write_barrier, now + operation.latency, "special registers")
        self._advance(warp, operation, now)

    def _enqueue(self, warp: Warp, operation: Operation, now: float) -> None:
        """Enqueues an operation. Operations leave the queue in order, each when its unit takes it."""
        unit = operation.unit
        first = max(now + self._chip.queue_delay, self._queue[-1] if self._queue else 0.0)
        if unit is Unit.SPECIAL:
            leaves = max(first, self._unit_free[unit])
            self._unit_free[unit] = leaves + operation.interval
            done = leaves
        else:
            leaves, done = self._access(operation, max(first, self._way_free))
            self._way_free = leaves + operation.interval
        self.busy[unit] += operation.interval
        self._queue.append(leaves)
        if operation.write_barrier is not None:
            self._hold(warp, operation.write_barrier, done - self._chip.queue_delay + operation.latency, _NAMES[unit])
        if operation.read_barrier is not None:
            self._hold(warp, operation.read_barrier, leaves + operation.read_latency, "operands read")

    def _access(self, operation: Operation, first: float) -> tuple[float, float]:
        """When an access to memory leaves the queue, and when its last byte passes; without latency."""
        leaves = done = first
        if operation.wavefronts:
            done = self._shared.serve(first, operation.wavefronts) - 1
            leaves = max(first, done + 1 - operation.wavefronts)
        if operation.global_bytes:
            done = max(done, self._global.serve(leaves, operation.global_bytes))
        return leaves, done

    @staticmethod
    def _hold(warp: Warp, scoreboard: int, until: float, reason: str) -> None:
        if until > warp.scoreboards[scoreboard]:
            warp.scoreboards[scoreboard] = until
            warp.waits_for[scoreboard] = reason

    def _advance(self, warp: Warp, operation: Operation, now: float) -> None:
        """Advances a warp to its next operation, and sets the earliest time when that may issue."""
        warp.position += 1
        if warp.finished:
            warp.ready = NEVER
            self.warps.remove(warp)
            return
        following = warp.path[warp.position]
        ready, reason = now + operation.stall, "stall counts"
        if operation.jumps and ready < now + self._chip.branch_latency:
            ready, reason = now + self._chip.branch_latency, "branches"
        if following.line != operation.line or operation.jumps:
            fetched = self._instructions.enter(following.line, now)
            if fetched > ready:
                ready, reason = fetched, "instruction fetch"
        for scoreboard in following.waits:
            if warp.scoreboards[scoreboard] > ready:
                ready, reason = warp.scoreboards[scoreboard], warp.waits_for[scoreboard]
        warp.ready, warp.reason = math.ceil(ready), reason

    @property
    def lines_fetched(self) -> int:
        """Lines of instructions that came from the shared cache."""
        return self._instructions.lines_fetched


_NAMES = {
    Unit.SPECIAL: "exponentials and conversions",
    Unit.SHARED: "shared memory",
    Unit.GLOBAL: "global memory",
    Unit.LOCAL: "local memory",
    Unit.CONSTANT: "constants",
}
