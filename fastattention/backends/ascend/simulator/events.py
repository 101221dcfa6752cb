"""The event model: pipes that run their operations in order, and transfers that share the paths to the L2 cache.

An operation starts when its pipe is free and everything that it waits for has ended. It has an amount, cycles of a unit
or bytes of a transfer, and a rate at which it goes when no other transfer asks. Where transfers ask together for more
than a path has, each gets the same share of what it asked for. core.py says which operations a core has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

ROUNDING = 1e-9  # share of an amount that may remain, by rounding, of an operation that has ended


class Path(IntEnum):
    """The paths that transfers share, in the order in which they limit them."""

    IN = 0  # the port into the core
    OUT = 1  # the port out of it
    MEMORY = 2  # the core's share of memory
    L2 = 3  # the core's share of the L2 cache


@dataclass(eq=False, slots=True)
class Operation:
    """One thing that a pipe does. `start` and `end` are cycles since the row block began, once it has been run."""

    unit: str  # "Cube"; "Vector", of which two do the same
    pipe: str  # "MTE2", "MTE1", "M", "FIX"; "MTE2", "V", "MTE3"
    stage: str  # "QK", "softmax", "PV", "O update", "flag", ...
    tile: int  # which score tile of the row block
    amount: float  # cycles, or bytes of a transfer
    rate: float = 1.0  # amount done in a cycle, when no other transfer asks
    paths: tuple[Path, ...] = ()
    after: tuple[Operation, ...] = ()
    latency: float = 0.0  # cycles from its end until other units see it
    start: float = 0.0
    end: float = 0.0
    waits_for: int = field(default=0, repr=False)
    dependents: list[Operation] = field(default_factory=list, repr=False)


def run(operations: Iterable[Operation], capacity: Mapping[Path, float]) -> float:
    """Run operations, each pipe in the order given, and set when they start and end; returns when the last ends.

    capacity: bytes a cycle of each path.
    """
    pipes: dict[tuple[str, str], deque[Operation]] = {}
    for operation in operations:
        pipes.setdefault((operation.unit, operation.pipe), deque()).append(operation)
        operation.waits_for = len(operation.after)
        for earlier in operation.after:
            earlier.dependents.append(operation)
    waiting = list(pipes.values())
    now, running, left = 0.0, list[Operation](), list[float]()  # what is left of each that runs
    known: dict[tuple[tuple[float, tuple[Path, ...]], ...], list[float]] = {}
    while True:
        wake = _start(waiting, running, left, now)
        if not running and wake == math.inf:
            break
        asked = tuple((operation.rate, operation.paths) for operation in running)
        rates = known.get(asked)
        if rates is None:
            rates = known[asked] = shared_rates(asked, capacity)
        step = min([wake - now, *(amount / rate for amount, rate in zip(left, rates, strict=True))])
        now += step
        for index in reversed(range(len(running))):
            left[index] -= step * rates[index]
            if left[index] <= ROUNDING * (running[index].amount + 1.0):
                del left[index]
                _end(running.pop(index), waiting, now)
    if any(waiting):
        raise AssertionError("operations wait for each other")
    return now


def _start(waiting: list[deque[Operation]], running: list[Operation], left: list[float], now: float) -> float:
    """Start operations on free pipes. Returns when the next can start that only waits for a latency."""
    wake = math.inf
    for queue in waiting:
        if not queue or queue[0].waits_for or queue[0] in running:
            continue
        if queue[0].start <= now:
            queue[0].start = now
            running.append(queue[0])
            left.append(queue[0].amount)
        else:
            wake = min(wake, queue[0].start)
    return wake


def _end(operation: Operation, waiting: list[deque[Operation]], now: float) -> None:
    operation.end = now
    next(queue for queue in waiting if queue and queue[0] is operation).popleft()
    for later in operation.dependents:
        later.waits_for -= 1
        later.start = max(later.start, now + operation.latency)


def shared_rates(asked: Iterable[tuple[float, tuple[Path, ...]]], capacity: Mapping[Path, float]) -> list[float]:
    """The rates of operations that ask for a rate on some paths: scaled down on each path that has less."""
    rates, paths = zip(*asked, strict=True) if asked else ((), ())
    shared = list(rates)
    for path in Path:
        users = [index for index, used in enumerate(paths) if path in used]
        wanted = sum(shared[index] for index in users)
        if wanted > capacity.get(path, math.inf):
            for index in users:
                shared[index] *= capacity[path] / wanted
    return shared


class Buffer:
    """A number of slots, used in turn. An operation that fills one waits for the operations that released it."""

    def __init__(self, num_slots: int) -> None:
        self._releases: deque[tuple[Operation, ...]] = deque([()] * num_slots)

    def free(self) -> tuple[Operation, ...]:
        """What the next filling waits for. Every slot but the last num_slots filled must have been released."""
        return self._releases.popleft()

    def release(self, *by: Operation) -> None:
        """The slot that was filled first may be filled again after these."""
        self._releases.append(by)
