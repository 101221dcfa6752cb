"""Block masks: read as given, then checked from shapes, dtypes and devices alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.mask_tiles import PairMask
from fastattention.attention.problem import BLOCK_STEP
from fastattention.attention.validation.common import Options
from fastattention.attention.validation.flex_masks import is_flex_mask, read_flex_mask
from fastattention.engine.checks import (
    TensorSpec,
    check_rank,
    read_int,
    require_tensor,
    spec_of,
)
from fastattention.errors import ArgumentError

BlockSize = int | Sequence[int] | None

DEFAULT_BLOCK_SIZE = (128, 128)
_MOST_TOKENS = 2**24  # largest side of a block: kernels count in 32 bits
_SIZES = f"one or two multiples of {BLOCK_STEP} from {BLOCK_STEP} to {_MOST_TOKENS}"


class BlockTensors(NamedTuple):
    """The fields of Inputs that a block mask fills."""

    block_mask: Tensor | None = None
    tile_index: Tensor | None = None
    tile_bits: Tensor | None = None


def read_block_mask(
    block_mask: object, block_size: BlockSize, q: object, k: object, options: Options, *, varlen: bool = False
) -> tuple[BlockTensors, Options]:
    """The tensors of a call's block mask, and its options with the size of blocks.

    block_mask: a tensor, or for a dense call a PairMask, or a BlockMask of torch, whose window joins that of the
        options.
    """
    if block_mask is None:
        if block_size is not None:
            raise ArgumentError(
                f"block_size={block_size!r} was given without block_mask, whose blocks it is the size of"
            )
        return BlockTensors(), options
    if not isinstance(block_mask, PairMask) and not is_flex_mask(block_mask):
        require_tensor("block_mask", block_mask)
        assert isinstance(block_mask, Tensor)
        block_m, block_n = read_block_size(block_size)
        return BlockTensors(block_mask), options._replace(block_m=block_m, block_n=block_n)
    kind = type(block_mask).__name__
    if varlen:
        raise ArgumentError(
            f"block_mask is a {kind}, which knows no sequences of other lengths; give a varlen call a bool tensor"
        )
    if block_size is not None:
        raise ArgumentError(f"block_size={block_size!r} was given with a {kind}, which has its own")
    axes = "batch_size, seqlen, heads, headdim"
    for name, tensor in (("q", q), ("k", k)):
        check_rank(name, spec_of(name, tensor), axes)
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    if isinstance(block_mask, PairMask):
        lengths = q.shape[1], k.shape[1]
        if block_mask.seqlens != lengths:
            raise ArgumentError(
                f"block_mask is for {block_mask.seqlens[0]} queries and {block_mask.seqlens[1]} keys, the call has "
                f"{lengths[0]} and {lengths[1]}; they must be the same"
            )
        block_m, block_n = block_mask.block_size
        return BlockTensors(*block_mask[:3]), options._replace(block_m=block_m, block_n=block_n)
    read = read_flex_mask(block_mask, q.shape[1], k.shape[1])
    block_m, block_n = read.block_size
    return BlockTensors(read.kept, read.tile_index, read.tile_bits), options._replace(
        block_m=block_m,
        block_n=block_n,
        window_left=_narrower(options.window_left, read.window_left),
        window_right=_narrower(options.window_right, read.window_right),
    )


def read_block_size(block_size: BlockSize) -> tuple[int, int]:
    """(block_m, block_n) from one size for both, a pair, or None for the default."""
    if block_size is None:
        return DEFAULT_BLOCK_SIZE
    is_pair = isinstance(block_size, Sequence) and not isinstance(block_size, str)
    given: Sequence[object] = block_size if is_pair else (block_size, block_size)  # type: ignore[assignment]
    sizes = [read_int("block_size", size, _SIZES) for size in given]
    if len(sizes) != 2 or not _are_sizes(*sizes):
        raise ArgumentError(f"block_size={block_size!r} must be {_SIZES}")
    return sizes[0], sizes[1]


def check_block_mask(
    mask: TensorSpec | None, q: TensorSpec, nheads: int, batch_size: int, seqlens: tuple[int, int], options: Options
) -> tuple[int, int] | None:
    """(block_m, block_n) of a mask that fits the call; None without one.

    seqlens: queries and keys of the longest sequence.
    """
    if mask is None:
        return None
    if mask.dtype is not torch.bool:
        raise ArgumentError(f"block_mask must be bool, True where a block is kept, got {mask.dtype}")
    if mask.device != q.device:
        raise ArgumentError(f"block_mask is on {mask.device} and q on {q.device}; they must be on the same device")
    sizes = options.block_m, options.block_n
    if not _are_sizes(*sizes):  # the operator of torch takes any integers
        raise ArgumentError(f"block_m={sizes[0]} and block_n={sizes[1]} must be {_SIZES}")
    rows, columns = (-(-seqlen // size) for seqlen, size in zip(seqlens, sizes, strict=True))
    shape = tuple(mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch_size) and shape[1] in (1, nheads) and shape[2:] == (rows, columns)
    if not fits:
        raise ArgumentError(
            f"block_mask must be (batch_size or 1, nheads or 1, seqlen_q / block_m, seqlen_k / block_n), rounded up, = "
            f"({batch_size} or 1, {nheads} or 1, {rows}, {columns}) with block_size={sizes}, got shape {shape}"
        )
    return sizes


def check_tiles(
    index: TensorSpec | None,
    bits: TensorSpec | None,
    q: TensorSpec,
    nheads: int,
    sizes: tuple[int, int, int],
    varlen: bool,
) -> bool:
    """Whether a call has tiles that hide pairs; raises unless both tensors fit. sizes: batch_size, seqlen_q, seqlen_k.

    `read_block_mask` makes these tensors; callers of the operator of torch may give any.
    """
    if index is None and bits is None:
        return False
    if index is None or bits is None or varlen:
        raise ArgumentError("tile_index and tile_bits must be given together, and to a dense call")
    batch_size, *seqlens = sizes
    tiles = [-(-seqlen // BLOCK_STEP) for seqlen in seqlens]
    shape = tuple(index.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch_size) and shape[1] in (1, nheads) and [*shape[2:]] == tiles
    if not fits or index.dtype is not torch.int32 or index.device != q.device:
        raise ArgumentError(
            f"tile_index must be ({batch_size} or 1, {nheads} or 1, {tiles[0]}, {tiles[1]}) int32 on {q.device}, "
            f"got {index}"
        )
    if tuple(bits.shape[1:]) != (BLOCK_STEP,) or bits.dtype is not torch.int64 or bits.device != q.device:
        raise ArgumentError(f"tile_bits must be (tiles, {BLOCK_STEP}) int64 on {q.device}, got {bits}")
    return True


def _are_sizes(block_m: int, block_n: int) -> bool:
    return all(BLOCK_STEP <= size <= _MOST_TOKENS and size % BLOCK_STEP == 0 for size in (block_m, block_n))


def _narrower(one: int, other: int) -> int:
    """The narrower of two sides of windows; -1 is unlimited."""
    return max(one, other) if -1 in (one, other) else min(one, other)
