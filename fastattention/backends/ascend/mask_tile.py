"""Tiling-mask: one small mask from which the mask of every tile is a window, in place of seqlen_q x seqlen_k of them.

The mask tile is strictly upper triangular: element (i, j) is True, which means hidden, when j > i. A tile of queries
q0, q0 + 1, ... and keys k0, k0 + 1, ... under a mask that hides key j from query i when j > i + shift is a window of
it, since the element (r, c) of such a tile is hidden when c > r + delta with delta = q0 + shift - k0:

    delta >= 0: the window's rows start at delta        delta < 0: its columns start at -delta

The left edge of a sliding window is the inverse of this triangle: key j is hidden from query i when j < i + shift, that
is unless j > i + shift - 1. The window of delta - 1 is True where a key is visible.

Only tiles that an edge crosses need a window, those with -tile_m < delta < tile_n, and windows of these lie inside as
long as tile_m + tile_n is at most MASK_TILE. Other tiles are wholly visible or skipped (TileRange.classify). The
operators of torch_npu take the same mask of the same size for their compressed modes, so both share one copy.

The idea is that of the FastAttention paper (arXiv 2410.16663, section on the tiling-mask).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MASK_TILE = 2048  # rows and columns, the paper's 2M; 4 MiB, at any sequence length


@functools.cache
def mask_tile(device: torch.device) -> Tensor:
    """The mask tile on `device`: bool (MASK_TILE, MASK_TILE), True where the column is greater than the row.

    It is made once for each device and shared: do not write to it.
    """
    return torch.ones(MASK_TILE, MASK_TILE, dtype=torch.bool, device=device).triu_(1)


def window_row(delta: int) -> int:
    """First row of the window that hides column c of row r when c > r + delta."""
    return max(delta, 0)


def window_column(delta: int) -> int:
    """First column of that window."""
    return max(-delta, 0)
