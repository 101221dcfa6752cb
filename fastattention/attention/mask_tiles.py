"""Masks of single pairs, stored as bits for tiles of 64 queries and 64 keys.

`index`, int32 (batch_size or 1, nheads or 1, rows of tiles, columns of tiles), holds -1 where a tile hides nothing.
Elsewhere it is the row of the tile in `bits`, int64 (tiles, 64): bit j of element i is 1 where query i of the tile sees
its key j. Only tiles that hide some pairs and show others need bits: 512 bytes each, where bool needs 4,096. Tiles that
show nothing share row 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.problem import BLOCK_STEP


class PairMask(NamedTuple):
    """A mask of single pairs, as the functions take it for `block_mask`. `fastattention.sparse.from_pairs` makes it."""

    kept: Tensor  # bool (batch_size or 1, nheads or 1, rows, columns): blocks with a visible pair
    tile_index: Tensor  # int32 (batch_size or 1, nheads or 1, seqlen_q / 64, seqlen_k / 64), rounded up
    tile_bits: Tensor  # int64 (tiles, 64)
    block_size: tuple[int, int]
    seqlens: tuple[int, int]  # queries and keys of the calls that it is for


def tiles_of(pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which tiles show anything, bool like the index; the index; the bits. pairs: bool (.., .., seqlen_q, seqlen_k)."""
    batch_size, nheads, seqlen_q, seqlen_k = pairs.shape
    rows, columns = -(-seqlen_q // BLOCK_STEP), -(-seqlen_k // BLOCK_STEP)
    padding = (0, columns * BLOCK_STEP - seqlen_k, 0, rows * BLOCK_STEP - seqlen_q)
    tiles = F.pad(pairs, padding).view(batch_size, nheads, rows, BLOCK_STEP, columns, BLOCK_STEP).transpose(3, 4)
    hides = ~F.pad(pairs, padding, value=True).view(batch_size, nheads, rows, BLOCK_STEP, columns, BLOCK_STEP)
    shown, partial = tiles.flatten(4).any(dim=-1), hides.transpose(3, 4).flatten(4).any(dim=-1)
    index, mixed = numbered(shown, partial, 1)
    return shown, index, torch.cat((no_pairs(pairs.device), pack(tiles[mixed])))


def numbered(shown: Tensor, partial: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """(index, mixed) of tiles of any shape: their entries of the index, and which of them need a row of bits.

    shown: whether a tile shows any pair; partial: whether it hides any; first: the row of the first mixed one
    """
    mixed = shown & partial
    count = mixed.flatten().cumsum(dim=0).view_as(mixed) + (first - 1)
    return torch.where(partial, torch.where(mixed, count, 0), -1).int(), mixed


def no_pairs(device: torch.device) -> Tensor:
    """Row 0 of the bits, int64 (1, 64)."""
    return torch.zeros(1, BLOCK_STEP, dtype=torch.int64, device=device)


def pack(visible: Tensor) -> Tensor:
    """The bits, int64 (tiles, 64), of tiles in bool (tiles, 64, 64)."""
    shifts = torch.arange(BLOCK_STEP, device=visible.device)
    return (visible.long() << shifts).sum(dim=-1)  # different bits never carry, and the last one is the sign


def visible_pairs(index: Tensor, bits: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Bool (batch_size or 1, nheads or 1, rows, keys): the pairs of these queries and keys that the tiles show.

    rows, keys: int64 (n,), counted from the first query and the first key
    """
    tile = index[:, :, rows // BLOCK_STEP][..., keys // BLOCK_STEP].long()
    word = bits[tile.clamp(min=0), (rows % BLOCK_STEP)[:, None]]
    return (tile < 0) | ((word >> (keys % BLOCK_STEP)) & 1).bool()
