"""How much of a call's communication is hidden: intervals of a trace, in plain Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Attention and products copy nothing, so every copy belongs to a collective.
_COMMUNICATION = re.compile(r"nccl|Memcpy|symmetric_memory::|fastattention_all_reduce")
_NO_WORK = re.compile(r"cu(da)?[A-Z]|nccl:|ProfilerStep|.*(Sync|Wait Event)$")  # calls, waits and names of ranges

Interval = tuple[float, float]


class Activity(NamedTuple):
    """A kernel or a copy, by the name in the trace; times in seconds."""

    name: str
    start: float
    end: float


class Overlap(NamedTuple):
    """One call, in seconds."""

    whole: float  # from the first activity's start to the last one's end
    compute: float  # while anything is computed: attention, products, sums and merges of parts
    communication: float  # while anything is communicated
    exposed: float  # while something is communicated and nothing computed

    @property
    def hidden(self) -> float:
        """The fraction of the communication that overlaps compute."""
        return 1.0 - self.exposed / self.communication if self.communication else 0.0

    def inflation(self, alone: float) -> float:
        """The fraction by which compute takes longer than `alone` seconds."""
        return self.compute / alone - 1.0


def is_work(name: str) -> bool:
    """Whether an activity of the device is a kernel or a copy, and no call, wait or range."""
    return _NO_WORK.match(name) is None


def is_communication(name: str) -> bool:
    """Whether a kernel or a copy moves data between GPUs, or waits for such. All others compute."""
    return _COMMUNICATION.search(name) is not None


def overlap(activities: Sequence[Activity]) -> Overlap:
    """The overlap of the kernels and copies of one call, of which there must be at least one."""
    work = [each for each in activities if is_work(each.name)]
    communication = union((each.start, each.end) for each in work if is_communication(each.name))
    compute = union((each.start, each.end) for each in work if not is_communication(each.name))
    return Overlap(
        whole=max(each.end for each in work) - min(each.start for each in work),
        compute=length(compute),
        communication=length(communication),
        exposed=length(communication) - length(common(communication, compute)),
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points in intervals that ascend and do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def common(these: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The intersection of two unions."""
    found: list[Interval] = []
    this = other = 0
    while this < len(these) and other < len(others):
        start, end = max(these[this][0], others[other][0]), min(these[this][1], others[other][1])
        if start < end:
            found.append((start, end))
        if these[this][1] < others[other][1]:
            this += 1
        else:
            other += 1
    return found


def length(intervals: Sequence[Interval]) -> float:
    """The length of a union."""
    return sum(end - start for start, end in intervals)
