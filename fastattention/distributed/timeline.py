"""Blocks in time: compute in one lane, all-reduces in the other. Plain Python.

docs/internals/tensor-parallel-plan.md has the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Event(NamedTuple):
    """When something ran, in seconds since the call began, and of which block."""

    start: float
    end: float
    block: int


@dataclass(frozen=True)
class Timeline:
    """What each lane was busy with, in order."""

    compute: tuple[Event, ...]
    communication: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Until the last all-reduce is done."""
        return self.communication[-1].end


class Lanes(NamedTuple):
    """How far the lanes are once compute has been given some blocks and is done with them."""

    computed: float  # seconds since the call began
    left: float  # seconds that the all-reduces of these blocks still take with no compute beside them

    @property
    def reduced(self) -> float:
        """When all is done, if nothing more is computed."""
        return self.computed + self.left

    def after(self, work: float, transfer: float, slowdown: float, own_slowdown: float) -> Lanes:
        """With one more block, of which `work` and `transfer` are compute and all-reduce, either alone."""
        beside = min(work * (1 + slowdown), self.left * (1 + own_slowdown))  # seconds in which both lanes are busy
        computed = self.computed + work + beside * (1 - 1 / (1 + slowdown))
        return Lanes(computed, max(self.left - beside / (1 + own_slowdown), 0.0) + transfer)


START = Lanes(0.0, 0.0)


def simulate(
    compute: Sequence[float], communication: Sequence[float], slowdown: float, own_slowdown: float = 0.0
) -> Timeline:
    """The blocks in time.

    compute, communication: seconds of each block's compute and of its all-reduce, either alone; at least one
    slowdown: compute under any all-reduce takes 1 + slowdown times as long
    own_slowdown: an all-reduce beside compute takes 1 + own_slowdown times as long

    Compute is never held up. An all-reduce begins when its compute and the all-reduce before it are done.
    """
    lanes, computed = START, []
    for block, (work, transfer) in enumerate(zip(compute, communication, strict=True)):
        before, lanes = lanes, lanes.after(work, transfer, slowdown, own_slowdown)
        computed.append(Event(before.computed, lanes.computed, block))
    reduced: list[Event] = []
    for own, transfer in zip(computed, communication, strict=True):
        start = max(own.end, reduced[-1].end) if reduced else own.end
        # Compute has no gaps, so that there is some beside an all-reduce until the last of it is done.
        beside = min(transfer * (1 + own_slowdown), max(lanes.computed - start, 0.0))
        reduced.append(Event(start, start + transfer + beside * (1 - 1 / (1 + own_slowdown)), own.block))
    return Timeline(tuple(computed), tuple(reduced))
