"""SimulatedCall: the lengths, heads and mask of a simulated call, and how its mask reaches the kernel."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import torch

from fastattention.attention.problem import Problem
from fastattention.backends.ascend.mask_tile import MASK_TILE
from fastattention.backends.ascend.simulator.tiles import FLOAT32_BYTES, HeadShape

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class MaskMode(enum.Enum):
    """The source of a kernel's mask, and whether hidden tiles are skipped."""

    TILING = "tiling-mask"  # windows of one small mask for tiles that an edge crosses; hidden tiles are skipped
    FULL_SKIPPING = "full mask, hidden tiles skipped"  # a mask of all queries and keys, read for every visible tile
    FULL = "full mask"  # a mask of all queries and keys, read for every tile; hidden ones are computed too


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
    score_bytes: int = FLOAT32_BYTES  # bytes of a score between Cube and Vector
    int8_cache: bool = False  # it takes buffers; its time is that of a cache in `dtype`

    @classmethod
    def of(cls, problem: Problem) -> SimulatedCall:
        """The workload of a problem, with its longest lengths."""
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
            int8_cache=problem.cache_dtype is torch.int8,
        )

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one query. The rows of a tile are then the heads that share a key head."""
        return self.seqlen_q == 1

    @property
    def has_window(self) -> bool:
        """Whether a window hides some keys."""
        return self.window_left != -1 or self.window_right != -1

    @property
    def shape(self) -> HeadShape:
        """Head dimensions as the kernel pads them."""
        widths = padded(self.headdim), padded(self.headdim_v)
        return HeadShape(*widths, self.dtype.itemsize, self.score_bytes, self.int8_cache)

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
        shift = self.seqlen_k - self.seqlen_q  # from a query to the key on its diagonal
        end = self.seqlen_k if self.window_right < 0 else shift + self.window_right + 1  # for the first query
        begin = -self.seqlen_q if self.window_left < 0 else shift - self.window_left
        pairs = float(self._sum_of_keys(end) - self._sum_of_keys(begin))
        return 2.0 * self.batch_size * self.nheads * pairs * (self.headdim + self.headdim_v)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q, k, v and out."""
        q_and_out = self.batch_size * self.seqlen_q * self.nheads * (self.headdim + self.headdim_v)
        k_and_v = self.batch_size * self.seqlen_k * self.nheads_k * (self.headdim + self.headdim_v)
        return (q_and_out + k_and_v) * self.dtype.itemsize

    @property
    def mask_bytes(self) -> int:
        """Bytes of the stored mask: one byte an element, shared by all heads and sequences."""
        if not self.has_window:
            return 0
        return MASK_TILE**2 if self.mask_mode is MaskMode.TILING else self.seqlen_q * self.seqlen_k

    def row_blocks(self, outer_tile_m: int, outer_tile_n: int) -> IntArray:
        """For each row block of a head: the tiles that it visits, and how many of them are masked.

        (number of row blocks, 2).
        """
        count, keys = math.ceil(self.num_rows / outer_tile_m), outer_tile_n
        if not self.has_window or self.mask_mode is MaskMode.FULL:
            num_tiles = max(math.ceil(self.seqlen_k / keys), 1)
            return np.tile(np.array([[num_tiles, num_tiles if self.has_window else 0]]), (count, 1))
        first = np.zeros(1, np.int64) if self.is_decode else np.arange(count) * outer_tile_m
        last = first if self.is_decode else np.minimum(first + outer_tile_m, self.num_rows) - 1
        begin = self._first_key(first)
        num_tiles = np.maximum(-((begin - self._past_last_key(last)) // keys), 1)
        masked = num_tiles
        if self.mask_mode is MaskMode.TILING:
            first_full = -((begin - self._first_key(last)) // keys)
            past_full = (self._past_last_key(first) - begin) // keys
            masked = num_tiles - np.maximum(past_full - first_full, 0)
        return np.broadcast_to(np.stack([num_tiles, masked], axis=1), (count, 2))

    def _first_key(self, row: IntArray) -> IntArray:
        """TileRange.row_begin of many rows."""
        if self.window_left < 0:
            return np.zeros_like(row)
        return np.clip(row + (self.seqlen_k - self.seqlen_q - self.window_left), 0, self.seqlen_k)

    def _past_last_key(self, row: IntArray) -> IntArray:
        """TileRange.row_end of many rows."""
        if self.window_right < 0:
            return np.full_like(row, self.seqlen_k)
        return np.clip(row + (self.seqlen_k - self.seqlen_q + self.window_right + 1), 0, self.seqlen_k)

    def _sum_of_keys(self, shift: int) -> int:
        """Sum over all queries of query + shift, clamped to 0 and seqlen_k."""
        begin, end = max(shift, 0), min(self.seqlen_q + shift, self.seqlen_k)  # queries that need no clamping
        within = (end - begin) * (begin + end - 1) // 2 if end > begin else 0
        return within + self.seqlen_k * min(max(self.seqlen_q + shift - self.seqlen_k, 0), self.seqlen_q)


def padded(headdim: int) -> int:
    """The power of two, from 16 on, that the kernel's tiles have for a head dimension."""
    return max(16, 1 << (headdim - 1).bit_length())


def decode_splits(num_row_blocks: int, num_tiles: int, num_cores: int) -> int:
    """Parts that the keys of a decode are cut into, so that every core has some; no more than tiles of keys."""
    return max(1, min(num_tiles, num_cores // max(num_row_blocks, 1)))
