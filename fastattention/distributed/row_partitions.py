"""The row partitions that are tried: a fixed, short list for each transport. Plain Python.

The rows of a call are those of all sequences, one after the other: batch_size * seqlen_q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

LEAST_ROWS = 512  # rows of a block; with fewer a matrix product has no full wave of CTAs
LEAST_BYTES = 8 << 20  # bytes of a call; all-reduces of half of that are mostly latency
CUT_ROWS = 128  # cuts inside a sequence are at multiples of it, as are the tiles of attention


class Recipe(NamedTuple):
    """How the rows of a call are divided, for any number of rows."""

    shares: tuple[int, ...]  # the share of each block in the rows
    attention_parts: int = 0  # equal parts, each with one call of attention; 0: one call for each block


class Partition(NamedTuple):
    """The rows of a call, divided."""

    rows: tuple[int, ...]  # rows of each block
    attention_rows: tuple[int, ...] = ()  # rows of each call of attention; (): one call for each block


# A block is summed while the next one is computed. Where communication takes longer, a smaller first block starts it
# early (the FastAttention paper's choice). Where compute takes longer, a smaller last block shortens the wait at the
# end.
OVERLAPPED = (
    Recipe((1, 1)), Recipe((1, 3)), Recipe((3, 1)), Recipe((3, 3, 2)), Recipe((1,) * 4), Recipe((1,) * 8),
    Recipe((1,) * 4, 1), Recipe((1,) * 8, 1),
)  # fmt: skip
# Partial sums go round the ranks, and products add to them. Small last blocks shorten what follows the last product.
RING = (
    Recipe((1,) * 8, 1), Recipe((1,) * 4, 1), Recipe((2, 2, 2, 1, 1), 1), Recipe((1, 1), 1), Recipe((2, 1, 1), 1),
    Recipe((1,) * 4, 2), Recipe((2, 1, 1), 2),
)  # fmt: skip


def worth_dividing(rows: int, nbytes: int) -> bool:
    """Whether a call is large enough for two blocks to be tried."""
    return nbytes >= LEAST_BYTES and rows >= 2 * LEAST_ROWS


def partitions(
    recipes: Sequence[Recipe], batch_size: int, seqlen_q: int, *, whole_sequences: bool
) -> Iterator[tuple[int, Partition]]:
    """The partitions of a call by the recipes, each with its index, without those that have a block below LEAST_ROWS.

    whole_sequences: attention cannot be cut within a sequence
    """
    rows = batch_size * seqlen_q
    for place, (shares, parts) in enumerate(recipes):
        if parts == 0:
            partition = Partition(_cut(shares, batch_size, seqlen_q, whole_sequences))
        else:
            partition = Partition(
                _cut(shares, 1, rows, False), _cut((1,) * parts, batch_size, seqlen_q, whole_sequences)
            )
        if len(partition.rows) == len(shares) and min(partition.rows) >= LEAST_ROWS:
            yield place, partition


def _cut(shares: Sequence[int], batch_size: int, seqlen_q: int, whole_sequences: bool) -> tuple[int, ...]:
    """Rows by these shares: whole sequences where there are many or they must be whole, else multiples of CUT_ROWS."""
    rows, total = batch_size * seqlen_q, sum(shares)
    unit = seqlen_q if whole_sequences or batch_size >= total else CUT_ROWS
    cuts = {rows * part // (total * unit) * unit for part in accumulate(shares[:-1])}
    return tuple(past - first for first, past in pairwise(sorted({0, *cuts, rows})))
