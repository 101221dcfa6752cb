"""Into which blocks the rows of a call are divided, so that the all-reduce of one runs under the compute of later ones.

Plain Python, deterministic. docs/tensor_parallel_plan.md has the model.
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
FINE_BLOCKS, FEWEST_FINE_BLOCKS = 8, 4
TOGETHER = ((1,), (1, 1), (2, 1, 1))  # shares of their number, with attention at once
# Shares of blocks that a running sum goes through, and parts of equal size with attention at once. The last blocks are
# small where all that follows the last product should be short.
IN_A_RING = (
    ((1,) * 8, 1), ((1,) * 4, 1), ((2, 2, 2, 1, 1), 1), ((1, 1), 1), ((2, 1, 1), 1), ((1,) * 4, 2), ((2, 1, 1), 2),
)  # fmt: skip
LEAST_GAIN = 0.03  # of the serial time; the costs are no more certain than that
ROWS_OF_A_CUT = 128  # cuts inside a sequence are at multiples of it, as are the tiles of attention
NUMBERS_OF_BLOCKS = (2, 3, 4, 6, 8, 12)
FEW_CUTS, CUTS = 16, 128  # of the rows: all divisions at few cuts, then the best of them moved to nearby ones of many
PATIENCE = 2  # the search ends when more blocks have gained nothing so often
STEPS = (4, 2, 1)  # cuts by which the search moves a boundary
SIMPLER = 0.01  # fewer blocks, and cuts between sequences, are preferred if they cost no more of the time than this


def worth_dividing(rows: int, nbytes: int) -> bool:
    """Whether there is enough to make two blocks of."""
    return nbytes >= 2 * LEAST_BYTES and rows >= 2 * LEAST_ROWS


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
    lanes = _Lanes(0.0, 0.0)
    computed, reduced = [], []
    for work, transfer in zip(compute, communication, strict=True):
        before, lanes = lanes, lanes.after(work, transfer, slowdown)
        computed.append(Event(before.computed, lanes.computed))
        reduced.append(Event(max(before.reduced, lanes.computed), lanes.reduced))
    return Timeline(tuple(computed), tuple(reduced))


class _Lanes(NamedTuple):
    """When what was given to both lanes so far will be done."""

    computed: float
    reduced: float

    def after(self, work: float, transfer: float, slowdown: float) -> _Lanes:
        """With one more block."""
        # Until `reduced` the all-reduces before run without a gap, so that this much of the work is done under them.
        slowed = min(work, max(self.reduced - self.computed, 0.0) / (1 + slowdown))
        computed = self.computed + work + slowed * slowdown
        return _Lanes(computed, max(computed, self.reduced) + transfer)


class Costs:
    """What blocks of a call take by one transport. Boundaries of blocks are rows: 0, where others begin, all rows."""

    def __init__(self, workload: Workload, compute: ComputeCost, transport: TransportCost) -> None:
        self._workload, self._compute, self._transport = workload, compute, transport
        self._pairs = workload.visible_pairs(0, workload.rows)
        self._known_before: dict[int, float] = {}
        self._known_transfers: dict[int, float] = {}

    def timeline(self, boundaries: Sequence[int]) -> Timeline:
        """The blocks in time."""
        blocks = list(pairwise(boundaries))
        compute = [self.compute_seconds(first, past) for first, past in blocks]
        transfers = [self._transfer_seconds(past - first) for first, past in blocks]
        return simulate(compute, transfers, self._transport.slowdown)

    def seconds(self, boundaries: Sequence[int]) -> float:
        """Until the last all-reduce is done."""
        lanes = _Lanes(0.0, 0.0)
        for first, past in pairwise(boundaries):
            lanes = self.after(lanes, first, past)
        return lanes.reduced

    def after(self, lanes: _Lanes, first: int, past: int) -> _Lanes:
        """The lanes with a block of rows first to past - 1."""
        work, transfer = self.compute_seconds(first, past), self._transfer_seconds(past - first)
        return lanes.after(work, transfer, self._transport.slowdown)

    def compute_seconds(self, first: int, past: int) -> float:
        """Of rows first to past - 1 alone: attention by what they see, the product by their number, and the block.

        All rows at once take what ComputeCost has. A block that begins inside a causal sequence costs as much as two:
        the keys before it are a rectangle beside the triangle of its own.
        """
        inside = self._workload.causal and first % self._workload.seqlen_q != 0
        return self._before(past) - self._before(first) + self._compute.block_seconds * (2 if inside else 1)

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
    alone = min(transports, key=lambda transport: transport.serial_seconds(size))
    serial = compute.seconds + alone.serial_seconds(size)
    best = Plan((workload.rows,), alone.name, serial, serial)
    for transport in transports:
        seconds, boundaries = divide(workload, Costs(workload, compute, transport))
        if seconds <= (1 - LEAST_GAIN) * serial and seconds < best.seconds:
            rows = tuple(past - first for first, past in pairwise(boundaries))
            best = Plan(rows, transport.name, seconds, serial)
    return best


def even(workload: Workload, number: int) -> tuple[int, ...]:
    """Rows of about so many blocks of about one size: whole sequences, if these are many or must be whole."""
    rows = workload.rows
    between = workload.whole_sequences or workload.batch_size >= number
    inside = ROWS_OF_A_CUT if rows >= number * ROWS_OF_A_CUT else 1
    unit = workload.seqlen_q if between else inside
    ends = sorted({rows * block // (number * unit) * unit for block in range(number)} | {rows})
    return tuple(past - first for first, past in pairwise(ends))


class Blocks(NamedTuple):
    """A division of rows."""

    rows: tuple[int, ...]  # of each block
    attended: tuple[int, ...] = ()  # of which attention is computed at once, of several blocks; empty: of each


def fine(workload: Workload) -> list[Blocks]:
    """Up to FINE_BLOCKS even blocks, with attention of each, or of several at once: as TOGETHER says, all, halves, ...

    The last are half as many blocks with attention of all rows, for which there is half as much to launch. Empty where
    there would be few of LEAST_BYTES and LEAST_ROWS.
    """
    number = min(FINE_BLOCKS, workload.rows * workload.row_bytes // LEAST_BYTES, workload.rows // LEAST_ROWS)
    rows = even(workload, number) if number > 0 else ()
    if len(rows) < FEWEST_FINE_BLOCKS:
        return []
    divisions = [Blocks(rows, _joined(rows, shares)) for shares in TOGETHER]
    return [Blocks(rows), *divisions, Blocks(even(workload, len(rows) // 2), (workload.rows,))]


def in_a_ring(workload: Workload) -> list[Blocks]:
    """Divisions for a transport whose sums are added to by the products: none with a block below LEAST_ROWS."""
    divisions = [
        Blocks(_shared_out(workload.rows, shares), even(workload, parts) if parts > 1 else (workload.rows,))
        for shares, parts in IN_A_RING
    ]
    return [blocks for blocks in divisions if min(blocks.rows) >= LEAST_ROWS]


def _shared_out(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Rows by these shares, but for the last all multiples of ROWS_OF_A_CUT."""
    unit = sum(shares) * ROWS_OF_A_CUT
    ends = [0, *(rows * part // unit * ROWS_OF_A_CUT for part in accumulate(shares[:-1])), rows]
    return tuple(past - first for first, past in pairwise(ends))


def _joined(rows: Sequence[int], shares: Sequence[int]) -> tuple[int, ...]:
    """Rows of neighbouring blocks, of whose number each has such a share."""
    ends = [len(rows) * part // sum(shares) for part in accumulate(shares)]
    return tuple(sum(rows[first:past]) for first, past in pairwise([0, *ends]))


class _Division(NamedTuple):
    seconds: float
    boundaries: tuple[int, ...]


def divide(workload: Workload, costs: Costs) -> tuple[float, tuple[int, ...]]:
    """Seconds and boundaries of the best division into two blocks or more; infinity where none is large enough.

    The best to about three percent: of many blocks, which gain little over fewer, not all numbers are tried.
    """
    least = max(LEAST_ROWS, -(-LEAST_BYTES // workload.row_bytes))
    whole = workload.whole_sequences or workload.seqlen_q <= ROWS_OF_A_CUT
    searches = [
        (_by_number(costs, _cuts(workload, between, FEW_CUTS), least), _cuts(workload, between, CUTS))
        for between in ((True,) if whole else (True, False))
    ]
    best = _Division(math.inf, (0, workload.rows))
    in_vain = 0
    for number in NUMBERS_OF_BLOCKS:
        before = best
        for divisions, cuts in searches:
            start = next((one for one in divisions if len(one.boundaries) == number + 1), None)
            found = best if start is None else _improved(costs, start, cuts, least)
            if found.seconds < (1 - SIMPLER) * best.seconds:
                best = found
        in_vain = in_vain + 1 if best is before else 0
        if in_vain == PATIENCE:
            break
    return best


def _cuts(workload: Workload, between: bool, most: int) -> list[int]:
    """About so many rows where blocks may begin, between sequences or also in them; 0 and all rows included."""
    rows, seqlen = workload.rows, workload.seqlen_q
    step = ROWS_OF_A_CUT * -(-rows // (ROWS_OF_A_CUT * most))
    if between or seqlen <= step:
        return [*range(0, rows, -(-step // seqlen) * seqlen), rows]
    return [*(first + row for first in range(0, rows, seqlen) for row in range(0, seqlen, step)), rows]


def _by_number(costs: Costs, cuts: list[int], least: int) -> Iterator[_Division]:
    """The best division at these cuts into one block, into two, and so on.

    Of divisions of the rows before a cut into as many blocks, the one that is reduced first is followed up: where its
    compute ends later, that is for the all-reduces which it hides, and those are then done.
    """
    ends: dict[int, tuple[_Lanes, tuple[int, ...]]] = {0: (_Lanes(0.0, 0.0), (0,))}
    while ends:
        longer: dict[int, tuple[_Lanes, tuple[int, ...]]] = {}
        for first, (lanes, boundaries) in ends.items():
            for past in cuts[bisect_left(cuts, first + least) :]:
                found = costs.after(lanes, first, past)
                if past not in longer or found.reduced < longer[past][0].reduced:
                    longer[past] = found, (*boundaries, past)
        ends = longer
        if cuts[-1] in ends:
            lanes, boundaries = ends.pop(cuts[-1])
            yield _Division(lanes.reduced, boundaries)


def _improved(costs: Costs, start: _Division, cuts: list[int], least: int) -> _Division:
    """Moves one boundary after another to other cuts, by more and then by fewer of them, wherever that gains."""
    best = start
    for step in STEPS:
        for block, places in product(range(1, len(start.boundaries) - 1), (-step, step)):
            before, here, after = best.boundaries[block - 1 : block + 2]
            place = bisect_left(cuts, here) + places
            if 0 <= place < len(cuts) and before + least <= cuts[place] <= after - least:
                moved = (*best.boundaries[:block], cuts[place], *best.boundaries[block + 1 :])
                best = min(best, _Division(costs.seconds(moved), moved), key=lambda division: division.seconds)
    return best
