"""The row partitions that are tried: a fixed, short list for each transport. Plain Python.

The rows of a call are those of all sequences, one after the other: batch_size * seqlen_q.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

LEAST_ROWS = 512  # of a block: fewer leave a matrix product without a full wave of CTAs
LEAST_BYTES = 8 << 20  # of a call: all-reduces of half of that are mostly latency
CUT_ROWS = 128  # cuts inside a sequence are at multiples of it, as are the tiles of attention


class Recipe(NamedTuple):
    """How the rows of a call are divided, whatever their number."""

    shares: tuple[int, ...]  # of the rows, for each block
    attention_parts: int = 0  # of equal size, with attention computed at once; 0: attention of each block


class Partition(NamedTuple):
    """The rows of a call, divided."""

    rows: tuple[int, ...]  # of each block
    attention_rows: tuple[int, ...] = ()  # of which attention is computed at once; (): of each block


# A block is summed while the next one is computed. Where communication takes longer, a smaller first block begins it
# early (the FastAttention paper's choice); where compute does, a smaller last block leaves little to wait for.
OVERLAPPED = (
    Recipe((1, 1)), Recipe((1, 3)), Recipe((3, 1)), Recipe((3, 3, 2)), Recipe((1,) * 4), Recipe((1,) * 8),
    Recipe((1,) * 4, 1), Recipe((1,) * 8, 1),
)  # fmt: skip
# Partial sums go round the ranks, and products add to them. The last blocks are small where all that follows the last
# product should be short.
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
    """What the recipes make of a call, each with its place. Left out: those with a block below LEAST_ROWS.

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
    """Rows by these shares: whole sequences where these are many or must be whole, else multiples of CUT_ROWS."""
    rows, total = batch_size * seqlen_q, sum(shares)
    unit = seqlen_q if whole_sequences or batch_size >= total else CUT_ROWS
    cuts = {rows * part // (total * unit) * unit for part in accumulate(shares[:-1])}
    return tuple(past - first for first, past in pairwise(sorted({0, *cuts, rows})))
