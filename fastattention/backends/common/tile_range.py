"""Which keys a query sees, and which tiles need no mask or no work: tile_range.hpp for Python and Triton.

first_key and past_last_key are plain arithmetic on integers, so that kernels in Triton compile these very functions.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class TileKind(enum.IntEnum):
    """What a tile of the score matrix needs."""

    SKIPPED = 0  # no query of the tile sees any of its keys
    PARTIAL = 1  # the mask must be applied
    FULL = 2  # every query sees every key


def first_key(i: int, seqlen_q: int, seqlen_k: int, left: int) -> int:
    """First key that query i sees, if it sees any."""
    return 0 if left < 0 else min(max(i + seqlen_k - seqlen_q - left, 0), seqlen_k)


def past_last_key(i: int, seqlen_q: int, seqlen_k: int, right: int) -> int:
    """One past the last key that query i sees; at most its first_key when it sees none."""
    return seqlen_k if right < 0 else min(max(i + seqlen_k - seqlen_q + right + 1, 0), seqlen_k)


@dataclass(frozen=True)
class TileRange:
    """The band of keys around the bottom-right aligned diagonal.

    Query i sees keys i + seqlen_k - seqlen_q - left to i + seqlen_k - seqlen_q + right, -1 being unlimited.
    """

    seqlen_q: int
    seqlen_k: int
    left: int
    right: int

    def row_begin(self, i: int) -> int:
        """First key that query i sees, if it sees any."""
        return first_key(i, self.seqlen_q, self.seqlen_k, self.left)

    def row_end(self, i: int) -> int:
        """One past the last key that query i sees; at most row_begin when it sees none."""
        return past_last_key(i, self.seqlen_q, self.seqlen_k, self.right)

    def classify(self, first_q: int, last_q: int, first_k: int, last_k: int) -> TileKind:
        """What the tile of queries first_q..last_q and keys first_k..last_k (inclusive) needs."""
        if self.row_end(last_q) <= first_k or self.row_begin(first_q) > last_k:
            return TileKind.SKIPPED
        if self.row_begin(last_q) <= first_k and self.row_end(first_q) > last_k:
            return TileKind.FULL
        return TileKind.PARTIAL
