"""The order in which ranks compute parts of blocks while running sums go round (ring_product.py)."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

MOST_BLOCKS = 16  # further blocks are joined


class Share(NamedTuple):
    """Rows [start, stop) of a block whose sum one rank completes."""

    start: int
    stop: int


def shares_of(rows: Sequence[int], size: int) -> list[list[Share]]:
    """Even shares by block and owner, for up to MOST_BLOCKS blocks; neighbours are joined if there are more."""
    ends = accumulate(joined(tuple(rows)), initial=0)
    return [_divided(start, stop, size) for start, stop in pairwise(ends)]


@functools.lru_cache(maxsize=4096)
def joined(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Rows of up to MOST_BLOCKS blocks; neighbours are joined if there are more."""
    together = -(-len(rows) // MOST_BLOCKS)
    return tuple(sum(rows[first : first + together]) for first in range(0, len(rows), together))


def _divided(start: int, stop: int, size: int) -> list[Share]:
    each = -(-(stop - start) // size)
    cuts = [min(start + rank * each, stop) for rank in range(size + 1)]
    return [Share(*cuts[rank : rank + 2]) for rank in range(size)]


def steps(num_blocks: int, size: int) -> Iterator[tuple[int, int]]:
    """(block, step) in the order in which every rank computes them: in each turn the newest block first.

    So a running sum has a whole turn to get to the next rank.
    """
    for turn in range(num_blocks + size - 1):
        for step in range(size):
            if 0 <= turn - step < num_blocks:
                yield turn - step, step
