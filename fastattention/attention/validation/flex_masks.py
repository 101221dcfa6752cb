"""The BlockMask of torch.nn.attention.flex_attention, read as kept blocks and what these hide.

A BlockMask lists full blocks, which are kept whole, and partial blocks, kept where its mask_mod is True. The compiled
kernels of flex_attention read it so; without torch.compile it applies mask_mod alone.

Some window may hide just what mask_mod hides in partial blocks, and nothing of full blocks. Causal masks and sliding
windows are such, and kernels compute them from positions. Any other mask, such as one of documents, becomes bits of
tiles (mask_tiles.py), which kernels read where a tile is neither whole nor hidden.

Nothing is guessed from the code of mask_mod: it is evaluated for every pair of the partial blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fastattention.attention import mask_tiles
from fastattention.attention.problem import BLOCK_STEP
from fastattention.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:  # its import takes seconds
    from torch.nn.attention.flex_attention import BlockMask

# mask_mod is evaluated for tiles of _TILE queries by _TILE keys.
_TILE = BLOCK_STEP
# Tiles at a time: 2^20 pairs, each of them 8 bytes in a tensor of indices.
_CHUNK_TILES = 256


class FlexBlocks(NamedTuple):
    """What a BlockMask leaves visible: the pairs of kept blocks that are inside the window, and not hidden by tiles."""

    kept: Tensor  # bool (batch_size or 1, nheads or 1, rows, columns), on the mask's device; not to be written to
    block_size: tuple[int, int]
    window_left: int  # inclusive, around the diagonal aligned to the bottom right; -1 is unlimited
    window_right: int
    tile_index: Tensor | None = None  # as Inputs.tile_index, not expanded; None where blocks and window say all
    tile_bits: Tensor | None = None  # as Inputs.tile_bits


_READ: MutableMapping[BlockMask, FlexBlocks] = WeakIdKeyDictionary()


def is_flex_mask(value: object) -> TypeGuard[BlockMask]:
    """Whether a value is a BlockMask. flex_attention is not imported for it: whoever has a BlockMask has done so."""
    module = sys.modules.get("torch.nn.attention.flex_attention")
    return module is not None and isinstance(value, module.BlockMask)


def read_flex_mask(block_mask: BlockMask, seqlen_q: int, seqlen_k: int) -> FlexBlocks:
    """What a mask for seqlen_q queries and seqlen_k keys leaves visible.

    It runs mask_mod and reads values from the mask's device. The result is kept for as long as the BlockMask lives,
    since one mask serves all layers. A mask is taken to be immutable: once it has been read, neither it, nor its
    mask_mod, nor a tensor that mask_mod reads may change.

    Raises ArgumentError for other lengths, for a BLOCK_SIZE that is no multiple of 64, and for lists of blocks that
    cannot be. Raises UnsupportedError where mask_mod raises, and while torch.compile or a dispatch mode follows.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        raise UnsupportedError(
            "block_mask is a BlockMask, whose mask_mod cannot be read while torch traces; give "
            "fastattention.sparse.from_pairs of the mask, or a bool tensor of its blocks with causal or window_size"
        )
    lengths = tuple(block_mask.shape[-2:])
    if lengths != (seqlen_q, seqlen_k):
        raise ArgumentError(
            f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, the call has {seqlen_q} and {seqlen_k}; "
            "they must be the same"
        )
    if block_mask not in _READ:
        with torch.inference_mode(False), torch.no_grad():  # a later call may need a gradient
            _READ[block_mask] = _read(block_mask, seqlen_q, seqlen_k)
    return _READ[block_mask]


def _read(mask: BlockMask, seqlen_q: int, seqlen_k: int) -> FlexBlocks:
    block_m, block_n = mask.BLOCK_SIZE
    if any(size < _TILE or size % _TILE for size in (block_m, block_n)):
        raise ArgumentError(f"block_mask has BLOCK_SIZE={(block_m, block_n)}; both must be multiples of {_TILE}")
    grid = _Grid(seqlen_q, seqlen_k, block_m, block_n)
    partial = _listed("kv_indices", mask.kv_num_blocks, mask.kv_indices, grid)
    full = torch.zeros_like(partial)
    if mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None:
        full = _listed("full_kv_indices", mask.full_kv_num_blocks, mask.full_kv_indices, grid)
    shape = (partial | full).shape
    partial, full = partial.expand(shape), full.expand(shape)
    if bool((partial & full).any()):
        raise ArgumentError("block_mask lists a block in kv_indices and in full_kv_indices; it may be in one of them")
    shown = _evaluate(mask.mask_mod, partial, grid)
    rows, columns = full.any(dim=0).any(dim=0).nonzero().unbind(dim=-1)
    visible = shown.visible | grid.diagonals(rows * block_m, columns * block_n, (block_m, block_n))
    kept, window = shown.kept | full, _window(visible, shown.hidden, grid)
    if window is not None:
        return FlexBlocks(kept, (block_m, block_n), *window)
    return FlexBlocks(kept, (block_m, block_n), -1, -1, *shown.tiles)


class _Grid(NamedTuple):
    """The score matrix and its blocks.

    Diagonals are numbered from that of the last query and the first key. Key j and query i are on diagonal
    j - i + seqlen_q - 1. The one on which a causal mask ends is seqlen_k - 1.
    """

    seqlen_q: int
    seqlen_k: int
    block_m: int
    block_n: int

    @property
    def rows(self) -> int:
        return -(-self.seqlen_q // self.block_m)

    @property
    def columns(self) -> int:
        return -(-self.seqlen_k // self.block_n)

    @property
    def num_diagonals(self) -> int:
        return max(self.seqlen_q + self.seqlen_k - 1, 0)

    def diagonals(self, first_q: Tensor, first_k: Tensor, size: tuple[int, int]) -> Tensor:
        """Bool (num_diagonals,): diagonals that cross rectangles of `size`, given by their first queries and keys."""
        last_q = (first_q + size[0]).clamp(max=self.seqlen_q) - 1
        last_k = (first_k + size[1]).clamp(max=self.seqlen_k) - 1
        lowest, highest = first_k - last_q + self.seqlen_q - 1, last_k - first_q + self.seqlen_q - 1
        begins = torch.bincount(lowest, minlength=self.num_diagonals + 1)
        ends = torch.bincount(highest + 1, minlength=self.num_diagonals + 1)
        return (begins - ends).cumsum(dim=0)[:-1] > 0


def _listed(name: str, num_blocks: Tensor, indices: Tensor, grid: _Grid) -> Tensor:
    """Bool (batch_size or 1, nheads or 1, rows, columns): the first num_blocks of the indices of each row."""
    while indices.dim() < 4:  # older torch drops axes where a mask is indexed
        num_blocks, indices = num_blocks[None], indices[None]
    if indices.shape[2] != grid.rows:
        raise ArgumentError(
            f"block_mask has {indices.shape[2]} rows of blocks in {name}; {grid.seqlen_q} queries in blocks of "
            f"{grid.block_m} have {grid.rows}"
        )
    counted = torch.arange(indices.shape[3], device=indices.device) < num_blocks[..., None]
    counted = counted & (indices < grid.columns)  # no key is in a block beyond
    listed = counted.new_zeros((*indices.shape[:3], grid.columns + 1))
    listed.scatter_(-1, torch.where(counted & (indices >= 0), indices, grid.columns).long(), True)
    listed = listed[..., : grid.columns]
    if int(listed.sum()) != int(counted.sum()):
        raise ArgumentError(
            f"block_mask lists a block twice in a row of {name}, or a negative one; each may be there once"
        )
    return listed


class _Tiles(NamedTuple):
    """Tiles of partial blocks; each field is int64 (tiles,)."""

    b: Tensor
    h: Tensor
    first_q: Tensor
    first_k: Tensor

    @classmethod
    def of(cls, index: Tensor, blocks: Tensor, grid: _Grid) -> _Tiles:
        """Tiles `index`, counted block by block. blocks: (blocks, 4), the columns being b, h, row, column."""
        per_row, per_block = _tiles_of_a_block(grid)
        b, h, row, column = blocks[index // per_block].unbind(dim=-1)
        down, right = index % per_block // per_row, index % per_row
        return cls(b, h, row * grid.block_m + down * _TILE, column * grid.block_n + right * _TILE)


def _tiles_of_a_block(grid: _Grid) -> tuple[int, int]:
    """Tiles in a row of a block, and in the whole block. Blocks may be far larger than the score matrix."""
    per_row = -(-min(grid.block_n, grid.seqlen_k) // _TILE)
    return per_row, per_row * -(-min(grid.block_m, grid.seqlen_q) // _TILE)


class _Shown(NamedTuple):
    """What mask_mod shows in partial blocks."""

    kept: Tensor  # bool, as the partial blocks: those with a visible pair
    visible: Tensor  # bool (num_diagonals,): diagonals with a visible pair in kept blocks
    hidden: Tensor  # bool (num_diagonals,): diagonals with a hidden one
    tiles: tuple[Tensor, Tensor]  # tile_index and tile_bits


def _evaluate(mask_mod: Callable[..., Tensor], partial: Tensor, grid: _Grid) -> _Shown:
    device = partial.device
    blocks = partial.nonzero()
    _, per_block = _tiles_of_a_block(grid)
    shows = torch.zeros(len(blocks) * per_block, dtype=torch.bool, device=device)
    visible, hidden = (torch.zeros(grid.num_diagonals, dtype=torch.bool, device=device) for _ in range(2))
    within = torch.arange(_TILE, device=device)
    tiles = _TileBits(partial.shape[:2], grid, device)
    for begin in range(0, len(shows), _CHUNK_TILES):
        index = torch.arange(begin, min(begin + _CHUNK_TILES, len(shows)), device=device)
        where = _Tiles.of(index, blocks, grid)
        q, k = where.first_q[:, None, None] + within[:, None], where.first_k[:, None, None] + within
        inside = (q < grid.seqlen_q) & (k < grid.seqlen_k)
        shown = _evaluate_tiles(mask_mod, where, grid) & inside
        shows[index] = shown.any(dim=-1).any(dim=-1)
        diagonal = k - q + grid.seqlen_q - 1
        visible[diagonal[shown]] = True
        hidden[diagonal[inside & ~shown & shows[index, None, None]]] = True
        tiles.add(where, shown, inside)
    seen = shows.view(-1, per_block).any(dim=-1)
    # Blocks without a visible pair are dropped. In others, a tile without one hides all its diagonals.
    index = (~shows.view(-1, per_block) & seen[:, None]).flatten().nonzero().squeeze(-1)
    where = _Tiles.of(index, blocks, grid)
    inside = (where.first_q < grid.seqlen_q) & (where.first_k < grid.seqlen_k)
    hidden |= grid.diagonals(where.first_q[inside], where.first_k[inside], (_TILE, _TILE))
    kept = torch.zeros_like(partial)
    kept[tuple(blocks[seen].unbind(dim=-1))] = True
    return _Shown(kept, visible, hidden, tiles.result())


class _TileBits:
    """Collects tile_index and tile_bits. Tiles that show nothing share the first row of tile_bits."""

    def __init__(self, batch_and_heads: tuple[int, ...], grid: _Grid, device: torch.device) -> None:
        rows, columns = (-(-seqlen // _TILE) for seqlen in (grid.seqlen_q, grid.seqlen_k))
        self._index = torch.full((*batch_and_heads, rows, columns), -1, dtype=torch.int32, device=device)
        self._bits = [mask_tiles.no_pairs(device)]
        self._count = 1

    def add(self, tiles: _Tiles, shown: Tensor, inside: Tensor) -> None:
        """Adds tiles, of which some may lie outside the score matrix. shown, inside: bool (tiles, 64, 64)."""
        partial = (inside & ~shown).any(dim=-1).any(dim=-1)
        index, mixed = mask_tiles.numbered(shown.any(dim=-1).any(dim=-1), partial, self._count)
        at = (tiles.b, tiles.h, tiles.first_q // _TILE, tiles.first_k // _TILE)
        self._index[tuple(axis[partial] for axis in at)] = index[partial]
        self._bits.append(mask_tiles.pack(shown[mixed]))
        self._count += len(self._bits[-1])

    def result(self) -> tuple[Tensor, Tensor]:
        return self._index, torch.cat(self._bits)


def _evaluate_tiles(mask_mod: Callable[..., Tensor], tiles: _Tiles, grid: _Grid) -> Tensor:
    """Bool (tiles, 64, 64), as torch's create_mask evaluates it. Elements without a query or a key are arbitrary."""
    from torch.nn.attention.flex_attention import create_mask

    def of_tile(tile: Tensor, _: Tensor, row: Tensor, column: Tensor) -> Tensor:
        # What mask_mod looks up for a query or a key may be as long as the call.
        q_idx = (tiles.first_q[tile] + row).clamp(max=grid.seqlen_q - 1)
        kv_idx = (tiles.first_k[tile] + column).clamp(max=grid.seqlen_k - 1)
        return mask_mod(tiles.b[tile], tiles.h[tile], q_idx, kv_idx)

    try:
        shown = create_mask(of_tile, len(tiles.b), 1, _TILE, _TILE, device=tiles.b.device)
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"block_mask cannot be read: its mask_mod raised {type(error).__name__}: {text}; "
            "give fastattention.sparse.from_pairs of the mask instead"
        ) from error
    return shown[:, 0].bool()


def _window(visible: Tensor, hidden: Tensor, grid: _Grid) -> tuple[int, int] | None:
    """The window (left, right) that shows all visible diagonals and no hidden one, unlimited where it hides nothing.

    None where there is no such window, or one without the diagonal.
    """
    shown = visible.nonzero()
    if len(shown) == 0:
        return -1, -1
    lowest, highest, causal = int(shown[0]), int(shown[-1]), grid.seqlen_k - 1
    if bool(hidden[lowest : highest + 1].any()):
        return None
    hides_left, hides_right = bool(hidden[:lowest].any()), bool(hidden[highest + 1 :].any())
    if (hides_left and lowest > causal) or (hides_right and highest < causal):
        return None
    return causal - lowest if hides_left else -1, highest - causal if hides_right else -1
