"""The event model: pipes that run their operations in order, and transfers that share the paths to the L2 cache.

An operation starts when its pipe is free and everything that it waits for has ended. It has an amount, cycles of a unit
or bytes of a transfer, and a rate at which it goes when nobody else asks. Where transfers ask together for more than a
path has, each gets the same share of what it asked for. That is all; core.py says which operations a core has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

ROUNDING = 1e-9  # of an amount: what rounding leaves of an operation that has ended


class Path(Enum):
    """What transfers share."""

    IN = "port into the core"
    OUT = "port out of the core"
    MEMORY = "the core's share of memory"
    L2 = "the core's share of the L2 cache"


@dataclass(eq=False)
class Operation:
    """One thing that a pipe does. `start` and `end` are cycles since the row block began, once it has been run."""

    unit: str  # "Cube"; "Vector", of which two do the same
    pipe: str  # "MTE2", "MTE1", "M", "FIX"; "MTE2", "V", "MTE3"
    stage: str  # "QK", "softmax", "PV", "O update", "flag", ...
    tile: int  # which score tile of the row block
    amount: float  # cycles, or bytes of a transfer
    rate: float = 1.0  # of it in a cycle, when nobody else asks
    paths: tuple[Path, ...] = ()
    after: tuple[Operation, ...] = ()
    latency: float = 0.0  # cycles from its end until others notice
    start: float = 0.0
    end: float = 0.0
    waits_for: int = field(default=0, repr=False)
    dependents: list[Operation] = field(default_factory=list, repr=False)


def run(operations: Iterable[Operation], capacity: Mapping[Path, float]) -> float:
    """Run operations, each pipe in the order given, and set when they start and end; returns when the last ends.

    capacity: bytes a cycle of each path.
    """
    waiting: dict[tuple[str, str], deque[Operation]] = {}
    for operation in operations:
        waiting.setdefault((operation.unit, operation.pipe), deque()).append(operation)
        operation.waits_for = len(operation.after)
        for earlier in operation.after:
            earlier.dependents.append(operation)
    now, left = 0.0, dict[Operation, float]()  # what is left of those that run
    while True:
        wake = _start(waiting, left, now)
        if not left and wake == float("inf"):
            break
        rates = shared_rates(list(left), capacity)
        now_then = min([wake, *(now + amount / rates[operation] for operation, amount in left.items())])
        for operation in list(left):
            left[operation] -= (now_then - now) * rates[operation]
            if left[operation] <= ROUNDING * max(operation.amount, 1.0):
                del left[operation]
                _end(operation, now_then)
        now = now_then
    if any(waiting.values()):
        raise AssertionError("operations wait for each other")
    return now


def _start(
    waiting: dict[tuple[str, str], deque[Operation]], left: dict[Operation, float], now: float
) -> float:
    """Start what can start on pipes that are free; returns when the next can that has to wait for a latency alone."""
    wake = float("inf")
    busy = {(operation.unit, operation.pipe) for operation in left}
    for pipe, queue in waiting.items():
        if pipe in busy or not queue or queue[0].waits_for:
            continue
        if queue[0].start <= now:
            operation = queue.popleft()
            operation.start = now
            left[operation] = operation.amount
        else:
            wake = min(wake, queue[0].start)
    return wake


def _end(operation: Operation, now: float) -> None:
    operation.end = now
    for later in operation.dependents:
        later.waits_for -= 1
        later.start = max(later.start, now + operation.latency)


def shared_rates(running: list[Operation], capacity: Mapping[Path, float]) -> dict[Operation, float]:
    """At what rate each operation goes: its own, scaled down on each path that is asked for more than it has."""
    rates = {operation: operation.rate for operation in running}
    for path in Path:
        users = [operation for operation in running if path in operation.paths]
        asked = sum(rates[operation] for operation in users)
        if asked > capacity.get(path, float("inf")):
            for operation in users:
                rates[operation] *= capacity[path] / asked
    return rates


class Buffer:
    """So many slots, used in turn. Whoever fills one waits for whatever released it."""

    def __init__(self, num_slots: int) -> None:
        self._releases: deque[tuple[Operation, ...]] = deque([()] * num_slots)

    def free(self) -> tuple[Operation, ...]:
        """What the next filling waits for. Every slot but the last num_slots filled must have been released."""
        return self._releases.popleft()

    def release(self, *by: Operation) -> None:
        """The slot that was filled first may be filled again after these."""
        self._releases.append(by)
