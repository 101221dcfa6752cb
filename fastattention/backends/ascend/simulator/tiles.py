"""Tile sizes: of the tiles that Cube and Vector exchange, and of what each unit processes at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastattention.backends.ascend.chips import Chip

CHUNK_KEYS = 128  # keys that the Cube loads and multiplies at a time, unless a buffer of its level 0 takes fewer
UPDATE_BYTES = 32 * 1024  # part of the product with values that a Vector reads at a time, as published
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Tiling:
    """Both levels of tiles, and how far they overlap."""

    outer_tile_m: int  # query rows of a score tile, what the Cube computes at once; power of two, >= 16
    outer_tile_n: int  # keys of a score tile; power of two, >= 16
    inner_tile_m: int  # rows of the score tile that one Vector unit holds at a time
    preload: int  # score tiles that the Cube has begun when it multiplies the first with values; 1: none ahead
    multibuffer: bool  # loads are double-buffered

    @property
    def num_buffers(self) -> int:
        """Buffers of everything that is loaded in parts."""
        return 2 if self.multibuffer else 1


@dataclass(frozen=True)
class HeadShape:
    """What a tile's cost depends on beside the tiling: head dimensions as the kernel pads them, bytes of an element."""

    headdim: int
    headdim_v: int
    element_bytes: int  # bytes of an element of q, k, v and the weights
    score_bytes: int = FLOAT32_BYTES  # bytes of a score between Cube and Vector
    int8_cache: bool = False  # the Vector units convert k and v to element_bytes

    @property
    def is_float32(self) -> bool:
        """The Cube multiplies float32 more slowly."""
        return self.element_bytes == FLOAT32_BYTES


@dataclass(frozen=True)
class CubeTiles:
    """Level 0 of the Cube: every buffer is halved, one half being filled while the other is used."""

    qk_keys: int  # keys of a product with queries that fill half of L0C
    qk_depth: int  # elements of headdim multiplied at a time
    pv_columns: int  # columns of values whose results fill at most half of L0C, and at most half of all columns
    pv_keys: int  # keys multiplied with values at a time


def cube_tiles(tiling: Tiling, shape: HeadShape, chip: Chip) -> CubeTiles:
    """The largest tiles that fit."""
    l0a, l0b, l0c = chip.l0a_bytes // 2, chip.l0b_bytes // 2, chip.l0c_bytes // 2
    rows = tiling.outer_tile_m
    wide = l0a // (rows * shape.element_bytes)  # depth of left operands
    qk_keys = min(tiling.outer_tile_n, CHUNK_KEYS, l0c // (rows * FLOAT32_BYTES))
    qk_depth = min(shape.headdim, wide, l0b // max(qk_keys * shape.element_bytes, 1))
    pv_columns = min(max(shape.headdim_v // 2, chip.cube_n), l0c // (rows * FLOAT32_BYTES))
    pv_keys = min(tiling.outer_tile_n, CHUNK_KEYS, wide, l0b // max(pv_columns * shape.element_bytes, 1))
    return CubeTiles(qk_keys, qk_depth, pv_columns, pv_keys)


def vector_rows(tiling: Tiling, chip: Chip) -> int:
    """Rows of a score tile that each Vector unit takes."""
    return math.ceil(tiling.outer_tile_m / chip.vectors_per_core)


def update_rows(tiling: Tiling, shape: HeadShape, chip: Chip) -> int:
    """Rows of the product with values that a Vector reads at a time."""
    return max(1, min(vector_rows(tiling, chip), UPDATE_BYTES // (shape.headdim_v * FLOAT32_BYTES)))
