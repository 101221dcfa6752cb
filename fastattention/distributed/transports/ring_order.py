"""Who computes which part of a block when, where a running sum goes round the ranks (ring_product.py)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

MOST_BLOCKS = 16  # more are joined


class Share(NamedTuple):
    """Rows [start, stop) of a block, whose sum a rank completes."""

    start: int
    stop: int


def shares_of(rows: Sequence[int], size: int) -> list[list[Share]]:
    """By block and owner: even shares of up to MOST_BLOCKS blocks, of which neighbours are joined if there are more."""
    ends = accumulate(joined(tuple(rows)), initial=0)
    return [_divided(start, stop, size) for start, stop in pairwise(ends)]


@functools.lru_cache(maxsize=4096)
def joined(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Rows of up to MOST_BLOCKS blocks, of which neighbours are joined if there are more."""
    together = -(-len(rows) // MOST_BLOCKS)
    return tuple(sum(rows[first : first + together]) for first in range(0, len(rows), together))


def _divided(start: int, stop: int, size: int) -> list[Share]:
    each = -(-(stop - start) // size)
    cuts = [min(start + rank * each, stop) for rank in range(size + 1)]
    return [Share(*cuts[rank : rank + 2]) for rank in range(size)]


def steps(num_blocks: int, size: int) -> Iterator[tuple[int, int]]:
    """(block, step) in the order in which every rank computes them: what is newest first in each turn.

    So a running sum has a whole turn to get to the next rank.
    """
    for turn in range(num_blocks + size - 1):
        for step in range(size):
            if 0 <= turn - step < num_blocks:
                yield turn - step, step
