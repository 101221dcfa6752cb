"""Into which blocks the rows of a call are divided, so that the all-reduce of one runs under the compute of later ones.

Plain Python, deterministic. docs/tensor_parallel.md has the model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from fastattention.distributed.costs import ComputeCost, TransportCost, Workload

LEAST_BYTES = 4 << 20  # of a block's all-reduce: smaller ones are mostly latency
LEAST_ROWS = 512  # of a block: fewer leave a matrix product without a full wave of CTAs
LEAST_GAIN = 0.03  # of the serial time; the costs are no more certain than that
ROWS_OF_A_CUT = 128  # cuts inside a sequence are at multiples of it, as are the tiles of attention
CUTS = 128  # about as many cuts are looked at; more would not change the time by a percent
NUMBERS_OF_BLOCKS = (2, 3, 4, 6, 8, 12)
PATIENCE = 2  # the search ends when more blocks have gained nothing so often
GROWTHS = (1 / 3, 0.6, 1.0, 1.6, 3.0)  # of a block over the one before, from which the search starts
STEPS = (8, 4, 2, 1)  # cuts by which the search moves a boundary
SIMPLER = 0.01  # fewer blocks, and cuts between sequences, are preferred if they cost no more of the time than this


class Event(NamedTuple):
    """When something ran, in seconds since the block began."""

    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Compute and all-reduce of each block of rows: one lane each, in order."""

    compute: tuple[Event, ...]
    communication: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Until the last all-reduce is done."""
        return self.communication[-1].end


@dataclass(frozen=True)
class Plan:
    """Blocks of rows, and what they take; times are predicted."""

    rows: tuple[int, ...]  # of each block; they sum to batch_size x seqlen_q
    transport: str
    seconds: float
    serial_seconds: float  # of one block, by the transport that is fastest alone


def simulate(compute: Sequence[float], communication: Sequence[float], slowdown: float) -> Timeline:
    """The blocks in time.

    compute, communication: seconds of each block's compute and of its all-reduce, either alone; at least one
    slowdown: compute under any all-reduce takes 1 + slowdown times as long

    Compute is never held up. An all-reduce begins when its compute and the all-reduce before it are done.
    """
    steps = list(_steps(compute, communication, slowdown))
    return Timeline(tuple(one for one, _ in steps), tuple(other for _, other in steps))


def _steps(compute: Sequence[float], communication: Sequence[float], slowdown: float) -> Iterator[tuple[Event, Event]]:
    """Compute and all-reduce of each block."""
    now = busy_until = 0.0  # of the two lanes
    for work, transfer in zip(compute, communication, strict=True):
        # From `now` on the all-reduces before run without a gap, so that this much of the work is done under them.
        slowed = min(work, max(busy_until - now, 0.0) / (1 + slowdown))
        end = now + work + slowed * slowdown
        begin = max(end, busy_until)
        busy_until = begin + transfer
        yield Event(now, end), Event(begin, busy_until)
        now = end


class Costs:
    """What blocks of a call take by one transport. Boundaries of blocks are rows: 0, where others begin, all rows."""

    def __init__(self, workload: Workload, compute: ComputeCost, transport: TransportCost) -> None:
        self._workload, self._compute, self._transport = workload, compute, transport
        self._pairs = workload.visible_pairs(0, workload.rows)
        self._known_before: dict[int, float] = {}
        self._known_transfers: dict[int, float] = {}

    def timeline(self, boundaries: Sequence[int]) -> Timeline:
        """The blocks in time."""
        return simulate(*self._lanes(boundaries), self._transport.slowdown)

    def seconds(self, boundaries: Sequence[int]) -> float:
        """Until the last all-reduce is done: as the timeline has it, sooner."""
        *_, (_, last) = _steps(*self._lanes(boundaries), self._transport.slowdown)
        return last.end

    def compute_seconds(self, first: int, past: int) -> float:
        """Of rows first to past - 1 alone: attention by what they see, the product by their number, and the block.

        All rows at once take what ComputeCost has. A block that begins inside a causal sequence costs as much as two:
        the keys before it are a rectangle beside the triangle of its own.
        """
        inside = self._workload.causal and first % self._workload.seqlen_q != 0
        return self._before(past) - self._before(first) + self._compute.block_seconds * (2 if inside else 1)

    def _lanes(self, boundaries: Sequence[int]) -> tuple[list[float], list[float]]:
        """Seconds of each block's compute, and of its all-reduce."""
        compute = [self.compute_seconds(first, past) for first, past in pairwise(boundaries)]
        return compute, [self._transfer_seconds(past - first) for first, past in pairwise(boundaries)]

    def _before(self, row: int) -> float:
        """Compute of all rows before `row`, without what blocks cost."""
        known = self._known_before.get(row)
        if known is None:
            share = row / self._workload.rows
            seen = self._workload.visible_pairs(0, row) / self._pairs if self._pairs else share
            linear = self._compute.linear_seconds - self._compute.block_seconds  # which is in the time of all rows once
            known = self._known_before[row] = self._compute.attention_seconds * seen + linear * share
        return known

    def _transfer_seconds(self, count: int) -> float:
        known = self._known_transfers.get(count)
        if known is None:
            known = self._known_transfers[count] = self._transport.seconds(count * self._workload.row_bytes)
        return known


def choose(workload: Workload, compute: ComputeCost, transports: Sequence[TransportCost]) -> Plan:
    """The fastest blocks and transport; one block unless more gain LEAST_GAIN. At least one transport is needed."""
    size = workload.rows * workload.row_bytes
    alone = min(transports, key=lambda transport: transport.seconds(size))
    serial = compute.seconds + alone.seconds(size)
    best = Plan((workload.rows,), alone.name, serial, serial)
    for transport in transports:
        seconds, boundaries = divide(workload, Costs(workload, compute, transport))
        if seconds <= (1 - LEAST_GAIN) * serial and seconds < best.seconds:
            rows = tuple(past - first for first, past in pairwise(boundaries))
            best = Plan(rows, transport.name, seconds, serial)
    return best


class _Division(NamedTuple):
    seconds: float
    boundaries: tuple[int, ...]


def divide(workload: Workload, costs: Costs) -> tuple[float, tuple[int, ...]]:
    """Seconds and boundaries of the best division into two blocks or more; infinity where none is large enough."""
    least = max(LEAST_ROWS, -(-LEAST_BYTES // workload.row_bytes))
    best = _Division(math.inf, (0, workload.rows))
    in_vain = 0
    for number in NUMBERS_OF_BLOCKS:
        before = best
        for cuts in _cuts(workload):
            start = _best_start(costs, cuts, number, least)
            found = best if start is None else _improved(costs, start, cuts, least)
            if found.seconds < (1 - SIMPLER) * best.seconds:
                best = found
        in_vain = in_vain + 1 if best is before else 0
        if in_vain == PATIENCE:
            break
    return best


def _cuts(workload: Workload) -> list[list[int]]:
    """Rows where blocks may begin, 0 and the number of rows included: between sequences, and then anywhere."""
    rows, seqlen = workload.rows, workload.seqlen_q
    step = ROWS_OF_A_CUT * -(-rows // (ROWS_OF_A_CUT * CUTS))
    sequences = -(-step // seqlen)
    choices = [[*range(0, rows, sequences * seqlen), rows]] if workload.batch_size > 1 else []
    if not workload.whole_sequences and seqlen > step:
        inside = [first + row for first in range(0, rows, seqlen) for row in range(0, seqlen, step)]
        choices.append([*inside, rows])
    return choices


def _best_start(costs: Costs, cuts: list[int], number: int, least: int) -> _Division | None:
    """The best of divisions whose blocks grow by a factor; None if there is no room for so many blocks."""
    found = []
    for growth in GROWTHS:
        boundaries = _growing(cuts, number, growth, least)
        if boundaries is not None:
            found.append(_Division(costs.seconds(boundaries), boundaries))
    return min(found, default=None)


def _growing(cuts: list[int], number: int, growth: float, least: int) -> tuple[int, ...] | None:
    """Boundaries of so many blocks of at least `least` rows, each `growth` times the one before as nearly as may be."""
    rows = cuts[-1]
    sizes = list(accumulate(growth**block for block in range(number)))
    boundaries = [0]
    for block in range(number - 1):
        lowest, highest = boundaries[-1] + least, rows - least * (number - 1 - block)
        wanted = max(min(rows * sizes[block] / sizes[-1], highest), lowest)
        after = bisect_left(cuts, wanted)
        near = [cut for cut in cuts[after - 1 : after + 1] if lowest <= cut <= highest]
        if not near:
            return None
        boundaries.append(min(near, key=lambda cut: abs(cut - wanted)))
    return (*boundaries, rows)


def _improved(costs: Costs, start: _Division, cuts: list[int], least: int) -> _Division:
    """Moves boundaries to other cuts, one or all from it on, by far and then by less, wherever that gains."""
    best = start
    last = len(start.boundaries) - 1
    for step in STEPS:
        for block in range(1, last):
            for past, places in product({block + 1, last}, (-step, step)):
                moved = _moved(best.boundaries, range(block, past), places, cuts, least)
                if moved is not None and (seconds := costs.seconds(moved)) < best.seconds:
                    best = _Division(seconds, moved)
    return best


def _moved(
    boundaries: tuple[int, ...], blocks: range, places: int, cuts: list[int], least: int
) -> tuple[int, ...] | None:
    """Where `blocks` begin moved by so many cuts; None if any block would then be smaller than `least`."""
    moved = list(boundaries)
    for block in blocks:
        place = bisect_left(cuts, boundaries[block]) + places
        if not 0 <= place < len(cuts):
            return None
        moved[block] = cuts[place]
    around = pairwise(moved[blocks.start - 1 : blocks.stop + 1])
    return tuple(moved) if all(past - first >= least for first, past in around) else None
