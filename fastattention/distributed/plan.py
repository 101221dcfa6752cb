"""Into which blocks the rows of a call are divided, so that the all-reduce of one runs under the compute of later ones.

Plain Python, deterministic. docs/internals/tensor-parallel-plan.md has the model.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import NamedTuple, Protocol

from fastattention.distributed.costs import ComputeCost, RingCost, TransportCost, Workload
from fastattention.distributed.divisions import ROWS_OF_A_CUT, Blocks, least_rows
from fastattention.distributed.ring_costs import RingCosts
from fastattention.distributed.timeline import START, Lanes, Timeline, simulate

LEAST_GAIN = 0.03  # of the serial time; the costs are no more certain than that
NUMBERS_OF_BLOCKS = (2, 3, 4, 6, 8, 12)
FEW_CUTS, CUTS = 16, 128  # of the rows: all divisions at few cuts, then the best of them moved to nearby ones of many
PATIENCE = 2  # the search ends when more blocks have gained nothing so often
STEPS = (4, 2, 1)  # cuts by which the search moves a boundary
SIMPLER = 0.01  # fewer blocks, and cuts between sequences, are preferred if they cost no more of the time than this


@dataclass(frozen=True)
class Plan:
    """Blocks of rows, and what they take; times are predicted."""

    rows: tuple[int, ...]  # of each block; they sum to batch_size x seqlen_q
    transport: str
    seconds: float
    serial_seconds: float  # of one block, by the transport that is fastest alone
    attended: tuple[int, ...] = ()  # rows of which attention is computed at once: of several blocks; empty: of each


class Offer(Protocol):
    """What blocks of a call take by one transport."""

    @property
    def serial_seconds(self) -> float:
        """Of compute and all-reduce of all rows at once, one after the other."""

    @property
    def all_reduce_seconds(self) -> float:
        """Of all rows at once, alone."""

    def best(self) -> tuple[float, Blocks]:
        """Seconds and blocks of the best division into two blocks or more; infinity where there is none."""

    def timeline(self, blocks: Blocks) -> Timeline:
        """The blocks in time."""


def offer_of(workload: Workload, compute: ComputeCost, transport: TransportCost | RingCost) -> Offer:
    """The offer of any transport."""
    if isinstance(transport, RingCost):
        return RingCosts(workload, compute, transport)
    return Costs(workload, compute, transport)


class Costs:
    """Of blocks that are computed, attention and product, and then summed, by one transport.

    Boundaries of blocks are rows: 0, where others begin, all rows.
    """

    def __init__(self, workload: Workload, compute: ComputeCost, transport: TransportCost) -> None:
        self._workload, self._compute, self._transport = workload, compute, transport
        self._pairs = workload.visible_pairs(0, workload.rows)
        self._known_before: dict[int, float] = {}
        self._known_transfers: dict[int, float] = {}

    @property
    def serial_seconds(self) -> float:
        """Of compute and all-reduce of all rows at once, one after the other."""
        return self._compute.seconds + self._transport.serial_seconds(self._nbytes)

    @property
    def all_reduce_seconds(self) -> float:
        """Of all rows at once, alone, as it is made to run beside compute."""
        return self._transport.seconds(self._nbytes)

    def best(self) -> tuple[float, Blocks]:
        """Seconds and blocks of the best division into two blocks or more; infinity where there is none."""
        seconds, boundaries = divide(self._workload, self)
        return seconds, Blocks(tuple(past - first for first, past in pairwise(boundaries)))

    def timeline(self, blocks: Blocks) -> Timeline:
        """The blocks in time, with attention of each."""
        assert not blocks.attended
        boundaries = list(pairwise(accumulate(blocks.rows, initial=0)))
        compute = [self.compute_seconds(first, past) for first, past in boundaries]
        transfers = [self._transfer_seconds(past - first) for first, past in boundaries]
        return simulate(compute, transfers, self._transport.slowdown, self._transport.own_slowdown)

    def seconds(self, boundaries: Sequence[int]) -> float:
        """Until the last all-reduce is done."""
        lanes = START
        for first, past in pairwise(boundaries):
            lanes = self.after(lanes, first, past)
        return lanes.reduced

    def after(self, lanes: Lanes, first: int, past: int) -> Lanes:
        """The lanes with a block of rows first to past - 1."""
        work, transfer = self.compute_seconds(first, past), self._transfer_seconds(past - first)
        return lanes.after(work, transfer, self._transport.slowdown, self._transport.own_slowdown)

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

    @property
    def _nbytes(self) -> int:
        return self._workload.rows * self._workload.row_bytes

    def _transfer_seconds(self, count: int) -> float:
        known = self._known_transfers.get(count)
        if known is None:
            known = self._known_transfers[count] = self._transport.seconds(count * self._workload.row_bytes)
        return known


def choose(workload: Workload, compute: ComputeCost, transports: Sequence[TransportCost | RingCost]) -> Plan:
    """The fastest blocks and transport; one block unless more gain LEAST_GAIN. At least one transport is needed."""
    offers = {transport.name: offer_of(workload, compute, transport) for transport in transports}
    alone = min(offers, key=lambda name: offers[name].serial_seconds)
    serial = offers[alone].serial_seconds
    best = Plan((workload.rows,), alone, serial, serial)
    for name, offer in offers.items():
        seconds, blocks = offer.best()
        if seconds <= (1 - LEAST_GAIN) * serial and seconds < best.seconds:
            best = Plan(blocks.rows, name, seconds, serial, blocks.attended)
    return best


class _Division(NamedTuple):
    seconds: float
    boundaries: tuple[int, ...]


def divide(workload: Workload, costs: Costs) -> tuple[float, tuple[int, ...]]:
    """Seconds and boundaries of the best division into two blocks or more; infinity where none is large enough.

    The best to about three percent: of many blocks, which gain little over fewer, not all numbers are tried.
    """
    least = least_rows(workload)
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
    ends: dict[int, tuple[Lanes, tuple[int, ...]]] = {0: (START, (0,))}
    while ends:
        longer: dict[int, tuple[Lanes, tuple[int, ...]]] = {}
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
