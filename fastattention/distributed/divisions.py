"""Divisions of a call's rows into blocks, whatever they take. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from fastattention.distributed.costs import Workload

LEAST_BYTES = 4 << 20  # of a block's all-reduce: smaller ones are mostly latency
LEAST_ROWS = 512  # of a block: fewer leave a matrix product without a full wave of CTAs
ROWS_OF_A_CUT = 128  # cuts inside a sequence are at multiples of it, as are the tiles of attention
FINE_BLOCKS, FEWEST_FINE_BLOCKS = 8, 4
TOGETHER = ((1,), (1, 1), (2, 1, 1))  # shares of their number, with attention at once
# Shares of blocks that a running sum goes through, and parts of equal size with attention at once. The last blocks are
# small where all that follows the last product should be short.
IN_A_RING = (
    ((1,) * 8, 1), ((1,) * 4, 1), ((2, 2, 2, 1, 1), 1), ((1, 1), 1), ((2, 1, 1), 1), ((1,) * 4, 2), ((2, 1, 1), 2),
)  # fmt: skip


class Blocks(NamedTuple):
    """A division of rows."""

    rows: tuple[int, ...]  # of each block
    attended: tuple[int, ...] = ()  # of which attention is computed at once, of several blocks; empty: of each


def least_rows(workload: Workload) -> int:
    """Of a block."""
    return max(LEAST_ROWS, -(-LEAST_BYTES // workload.row_bytes))


def worth_dividing(rows: int, nbytes: int) -> bool:
    """Whether there is enough to make two blocks of."""
    return nbytes >= 2 * LEAST_BYTES and rows >= 2 * LEAST_ROWS


def even(workload: Workload, number: int) -> tuple[int, ...]:
    """Rows of about so many blocks of about one size: whole sequences, if these are many or must be whole."""
    rows = workload.rows
    between = workload.whole_sequences or workload.batch_size >= number
    inside = ROWS_OF_A_CUT if rows >= number * ROWS_OF_A_CUT else 1
    unit = workload.seqlen_q if between else inside
    ends = sorted({rows * block // (number * unit) * unit for block in range(number)} | {rows})
    return tuple(past - first for first, past in pairwise(ends))


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


def in_a_ring(workload: Workload) -> dict[int, Blocks]:
    """Divisions for a transport whose sums are added to by the products, by their place in IN_A_RING.

    None with a block below LEAST_ROWS.
    """
    divisions = (
        Blocks(_shared_out(workload.rows, shares), even(workload, parts) if parts > 1 else (workload.rows,))
        for shares, parts in IN_A_RING
    )
    return {place: blocks for place, blocks in enumerate(divisions) if min(blocks.rows) >= LEAST_ROWS}


def _shared_out(rows: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Rows by these shares, but for the last all multiples of ROWS_OF_A_CUT."""
    unit = sum(shares) * ROWS_OF_A_CUT
    ends = [0, *(rows * part // unit * ROWS_OF_A_CUT for part in accumulate(shares[:-1])), rows]
    return tuple(past - first for first, past in pairwise(ends))


def _joined(rows: Sequence[int], shares: Sequence[int]) -> tuple[int, ...]:
    """Rows of neighbouring blocks, of whose number each has such a share."""
    ends = [len(rows) * part // sum(shares) for part in accumulate(shares)]
    return tuple(sum(rows[first:past]) for first, past in pairwise([0, *ends]))
