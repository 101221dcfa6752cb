"""SimulatedCall: the lengths, heads and mask of a simulated call, and how its mask reaches the kernel."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import torch

from fastattention.backends.ascend.mask_tile import MASK_TILE
from fastattention.backends.ascend.simulator.tiles import FLOAT32_BYTES, Shape, Tiling
from fastattention.backends.common.tile_range import TileRange
from fastattention.problem import Problem


class MaskMode(enum.Enum):
    """Where a kernel's mask comes from, and what it leaves out."""

    TILING = "tiling-mask"  # windows of one small mask for tiles that an edge crosses; hidden tiles are skipped
    FULL_SKIPPING = "full mask, hidden tiles skipped"  # a mask of all queries and keys, read for every visible tile
    FULL = "full mask"  # likewise, read for every tile; hidden ones are computed too


@dataclass(frozen=True)
class SimulatedCall:
    """One call of attention on a batch of equally long sequences."""

    batch_size: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    dtype: torch.dtype
    window_left: int = -1
    window_right: int = -1  # 0 when causal
    mask_mode: MaskMode = MaskMode.TILING
    score_bytes: int = FLOAT32_BYTES  # of a score between Cube and Vector

    @classmethod
    def of(cls, problem: Problem) -> SimulatedCall:
        """The longest lengths of a problem."""
        return cls(
            problem.batch_size,
            problem.seqlen_q,
            problem.seqlen_k,
            problem.nheads,
            problem.nheads_k,
            problem.headdim,
            problem.headdim_v,
            problem.dtype,
            problem.window_left,
            problem.window_right,
        )

    @property
    def is_decode(self) -> bool:
        """One query a sequence: the rows of a tile are then the heads that share a key head."""
        return self.seqlen_q == 1

    @property
    def has_window(self) -> bool:
        """Some keys are hidden."""
        return self.window_left != -1 or self.window_right != -1

    @property
    def shape(self) -> Shape:
        """Head dimensions as the kernel pads them."""
        return Shape(padded(self.headdim), padded(self.headdim_v), self.dtype.itemsize, self.score_bytes)

    @property
    def group_size(self) -> int:
        """Query heads that share a key head."""
        return self.nheads // self.nheads_k

    @property
    def num_rows(self) -> int:
        """Rows of the scores of one head, or in a decode of one key head."""
        return self.group_size if self.is_decode else self.seqlen_q

    @property
    def num_heads(self) -> int:
        """Heads, of all sequences, that have such rows."""
        return self.batch_size * (self.nheads_k if self.is_decode else self.nheads)

    @property
    def useful_flops(self) -> float:
        """Multiplications and additions of both products on visible scores."""
        diagonal = np.arange(self.seqlen_q) + self.seqlen_k - self.seqlen_q
        begin = 0 if self.window_left < 0 else diagonal - self.window_left
        end = self.seqlen_k if self.window_right < 0 else diagonal + self.window_right + 1
        seen = np.clip(end, 0, self.seqlen_k) - np.clip(begin, 0, self.seqlen_k)
        pairs = float(np.broadcast_to(np.maximum(seen, 0), self.seqlen_q).sum())
        return 2.0 * self.batch_size * self.nheads * pairs * (self.headdim + self.headdim_v)

    @property
    def tensor_bytes(self) -> int:
        """Of q, k, v and out."""
        q_and_out = self.batch_size * self.seqlen_q * self.nheads * (self.headdim + self.headdim_v)
        k_and_v = self.batch_size * self.seqlen_k * self.nheads_k * (self.headdim + self.headdim_v)
        return (q_and_out + k_and_v) * self.dtype.itemsize

    @property
    def mask_bytes(self) -> int:
        """Of the stored mask: one byte an element, shared by all heads and sequences."""
        if not self.has_window:
            return 0
        return MASK_TILE**2 if self.mask_mode is MaskMode.TILING else self.seqlen_q * self.seqlen_k

    def row_blocks(self, tiling: Tiling) -> list[tuple[int, int]]:
        """For each row block of a head: tiles that it visits, and those of them to which a mask is applied."""
        blocks = range(math.ceil(self.num_rows / tiling.outer_tile_m))
        if self.mask_mode is MaskMode.FULL and self.has_window:
            num_tiles = math.ceil(self.seqlen_k / tiling.outer_tile_n)
            return [(num_tiles, num_tiles)] * len(blocks)
        if not self.has_window:
            return [self._row_block(0, tiling)] * len(blocks)
        return [self._row_block(block, tiling) for block in blocks]

    def _row_block(self, block: int, tiling: Tiling) -> tuple[int, int]:
        first = 0 if self.is_decode else block * tiling.outer_tile_m
        last = 0 if self.is_decode else min(first + tiling.outer_tile_m, self.num_rows) - 1
        begin, end = self._band.row_begin(first), self._band.row_end(last)
        num_tiles = max(math.ceil((end - begin) / tiling.outer_tile_n), 1)
        if not self.has_window:
            return num_tiles, 0  # every row block is like the first
        if self.mask_mode is MaskMode.FULL_SKIPPING:
            return num_tiles, num_tiles
        first_full = math.ceil((self._band.row_begin(last) - begin) / tiling.outer_tile_n)
        past_full = (self._band.row_end(first) - begin) // tiling.outer_tile_n
        return num_tiles, num_tiles - max(past_full - first_full, 0)

    @property
    def _band(self) -> TileRange:
        return TileRange(self.seqlen_q, self.seqlen_k, self.window_left, self.window_right)


def padded(headdim: int) -> int:
    """The power of two, from 16 on, that the kernel's tiles have for a head dimension."""
    return max(16, 1 << (headdim - 1).bit_length())


def decode_splits(num_row_blocks: int, num_tiles: int, num_cores: int) -> int:
    """Parts that the keys of a decode are cut into, so that every core has some; no more than tiles of keys."""
    return max(1, min(num_tiles, num_cores // max(num_row_blocks, 1)))
