"""A reference of kernels/schedule.cuh, which shares out the keys of a decode over CTAs, from lists of tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastattention.attention.problem import Layout
from fastattention.backends.common.tile_range import TileRange
from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.backends.cuda.attention.decode_heuristics import Split
from unit.samples import problem_of

# A call with one query of each head against a long cache.
DECODE = problem_of(layout=Layout.KVCACHE, seqlen_q=1)


class SequenceSpan(NamedTuple):
    """The span of one sequence that a CTA group has: some of its tiles, in order."""

    cta_group: int
    batch: int
    tiles: list[int]
    is_whole: bool
    slot: int  # slot of the group's first unit, for a partial result


class TileStream:
    """The tiles of all sequences, and the CTA group of each."""

    def __init__(self, tiles: Sequence[int], split: Split) -> None:
        """tiles: number of tiles of each sequence."""
        self.split = split
        self.ends = list(itertools.accumulate(tiles))
        self.begins = [0, *self.ends[:-1]]
        if split.num_splits > 0:
            self.spans = [part for batch in range(len(tiles)) for part in self._splits_of(batch)]
        else:
            total = self.ends[-1] if tiles else 0
            self.spans = _even_parts(range(total), min(split.num_cta_groups, total))

    def _splits_of(self, batch: int) -> list[list[int]]:
        tiles = range(self.begins[batch], self.ends[batch])
        parts = _even_parts(tiles, min(self.split.num_splits, len(tiles)))
        return parts + [[]] * (self.split.num_splits - len(parts))

    def batch_with(self, tile: int) -> int:
        """The sequence that has a tile."""
        return next(batch for batch, end in enumerate(self.ends) if tile < end)

    def cta_groups_of(self, batch: int) -> list[int]:
        """The groups that have tiles of a sequence."""
        return [cta_group for cta_group, _ in enumerate(self.spans) if self._shared(cta_group, batch)]

    def sequence_spans(self) -> list[SequenceSpan]:
        """The spans of every CTA group, in its order."""
        return [
            self._sequence_span(cta_group, batch, tiles)
            for cta_group, _ in enumerate(self.spans)
            for batch, _ in enumerate(self.ends)
            if (tiles := self._shared(cta_group, batch))
        ]

    def _shared(self, cta_group: int, batch: int) -> list[int]:
        span = self.spans[cta_group]  # tiles one after the other
        return list(range(max(span[0], self.begins[batch]), min(span[-1] + 1, self.ends[batch]))) if span else []

    def _sequence_span(self, cta_group: int, batch: int, tiles: list[int]) -> SequenceSpan:
        begins = tiles[0] == self.begins[batch]
        place = cta_group if self.split.num_splits > 0 else 2 * cta_group + begins
        is_whole = begins and tiles[-1] == self.ends[batch] - 1
        return SequenceSpan(cta_group, batch, tiles, is_whole, place * self.split.num_units)


def _even_parts(tiles: range, parts: int) -> list[list[int]]:
    """Even parts of tiles, the longer ones first."""
    return [part.tolist() for part in np.array_split(np.arange(tiles.start, tiles.stop), parts)] if parts > 0 else []


def tiles_of(keys: int, seqlen_q: int, window: tuple[int, int], config: KernelConfig) -> int:
    """Tiles of the stream that a sequence has. window: (left, right), -1 unlimited."""
    mask = TileRange(seqlen_q, keys, *window)
    first_key = mask.row_begin(0) // config.tile_n * config.tile_n
    return max(1, -(-(mask.row_end(seqlen_q - 1) - first_key) // config.stream_tile))
