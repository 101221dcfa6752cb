"""Problem: everything about one attention call except its tensors. Inputs: those tensors.

The package `validation` makes a Problem from a call's arguments. It is frozen and hashable, and is all a backend needs
to say whether it can serve the call. Scalars arrive normalized: a backend never sees a default, a negative window other
than -1, or a causal flag that disagrees with the window.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_HEADDIM, MAX_HEADDIM_V = 576, 512  # the largest head dimensions of keys and of values
BLOCK_STEP = 64  # block sizes of a block mask are multiples of it, so that tiles of kernels and blocks nest
PAIR_MASK = "masks of single pairs"  # stands for Problem.hides_pairs among the arguments of a call


class Layout(enum.Enum):
    """How the sequences of a batch lie in memory."""

    DENSE = "dense"  # q (batch_size, seqlen_q, nheads, headdim), k and v (batch_size, seqlen_k, nheads_k, headdim)
    VARLEN = "varlen"  # q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim) or pages
    KVCACHE = "kvcache"  # q as dense; k and v are caches with per-sequence lengths, dense or pages


@dataclass(frozen=True)
class Problem:
    """Frozen shapes, dtype and mask of one call.

    `seqlen_q` and `seqlen_k` are the longest of the batch: for VARLEN the given or derived maxima, for KVCACHE
    `seqlen_k` is the capacity of the cache in tokens.
    """

    layout: Layout
    device: torch.device
    dtype: torch.dtype
    batch_size: int
    seqlen_q: int
    seqlen_k: int
    total_q: int  # query tokens of the whole batch
    nheads: int
    nheads_k: int
    headdim: int
    headdim_v: int
    softmax_scale: float
    window_left: int  # keys visible to the left of the diagonal; -1 unlimited
    window_right: int  # keys visible to the right of it; -1 unlimited, 0 when causal
    softcap: float = 0.0  # 0 is off
    score_tensors: tuple[str, ...] = ()  # of alibi_slopes, attn_bias and sinks, those that are given
    block_size: tuple[int, int] | None = None  # (block_m, block_n) of the block mask in tokens; None without one
    hides_pairs: bool = False  # kept blocks of the block mask hide single pairs: Inputs.tile_index and tile_bits
    dropout_p: float = 0.0
    deterministic: bool = False
    qk_dtype: torch.dtype | None = None  # int8 when q @ k^T multiplies int8 values; None when it multiplies `dtype`
    grads: tuple[str, ...] = ()  # fields of Inputs whose gradients autograd will ask for
    in_transform: bool = False  # torch.func or forward-mode differentiation follows the call
    return_lse: bool = False
    return_mask: bool = False  # with dropout: also return what flash-attn calls S_dmask
    page_block_size: int | None = None  # tokens a page; None when k and v are not paged
    panel_size: int = 0  # tokens of a panel of a cache in panels (backends/common/panel_cache.py); 0: rows
    seqlen_new: int = 0  # tokens appended to the cache by this call
    rotary_dim: int = 0  # leading elements of headdim that are rotated; 0 is off
    rotary_interleaved: bool = True
    num_splits: int = 0  # parts the keys of a decode are split into; 0 lets the backend choose
    cache_dtype: torch.dtype | None = (
        None  # of quantized caches and pages: int8 or float8_e4m3fn; None when they have `dtype`
    )

    def __hash__(self) -> int:
        """The hash, computed once: calls look their problem up several times, and hashing takes as long as a launch."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, field.name) for field in dataclasses.fields(self)))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, Any]:
        """The fields without the hash, which another process computes differently."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @functools.cached_property
    def score_arguments(self) -> tuple[str, ...]:
        """Arguments of the call, by name, that change scores or weights beyond scale and mask."""
        others = ("block_mask", self.block_size), (PAIR_MASK, self.hides_pairs), ("qk_dtype", self.qk_dtype)
        numbers = ("dropout_p", self.dropout_p), ("softcap", self.softcap)
        return (*self.score_tensors, *(name for name, value in (*others, *numbers) if value))

    @property
    def axes(self) -> str:
        """Sizes of the call by the names of their axes; seqlen_q and seqlen_k are the longest of the batch."""
        names = "batch_size seqlen_q seqlen_k nheads nheads_k headdim headdim_v".split()
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    @property
    def needs_grad(self) -> bool:
        """True when the call is differentiated in any way."""
        return bool(self.grads) or self.in_transform

    @property
    def keeps_lse(self) -> bool:
        """True when a backend with a backward returns lse: asked for, or for that backward."""
        return self.return_lse or bool(self.grads)

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.nheads // self.nheads_k

    @property
    def is_causal(self) -> bool:
        """True when the mask is exactly the bottom-right aligned triangle."""
        return self.window_left == -1 and self.window_right == 0

    @property
    def has_window(self) -> bool:
        """True when either side of the diagonal is bounded (causal included)."""
        return self.window_left != -1 or self.window_right != -1

    @property
    def is_paged(self) -> bool:
        """True when k and v are pages that a block table puts in order."""
        return self.page_block_size is not None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """(total_q, nheads, headdim_v) when varlen, else (batch_size, seqlen_q, nheads, headdim_v)."""
        if self.layout is Layout.VARLEN:
            return (self.total_q, self.nheads, self.headdim_v)
        return (self.batch_size, self.seqlen_q, self.nheads, self.headdim_v)

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """(nheads, total_q, seqlen_k) when varlen, else (batch_size, nheads, seqlen_q, seqlen_k)."""
        if self.layout is Layout.VARLEN:
            return (self.nheads, self.total_q, self.seqlen_k)
        return (self.batch_size, self.nheads, self.seqlen_q, self.seqlen_k)

    @property
    def blocks_shape(self) -> tuple[int, int, int, int]:
        """Shape of a block mask: (batch_size, nheads, rows of blocks, columns of blocks) of the longest sequence."""
        assert self.block_size is not None
        block_m, block_n = self.block_size
        return (self.batch_size, self.nheads, -(-self.seqlen_q // block_m), -(-self.seqlen_k // block_n))

    @property
    def tiles_shape(self) -> tuple[int, int, int, int]:
        """Shape of tile_index: (batch_size, nheads, rows of tiles, columns of tiles)."""
        rows, columns = -(-self.seqlen_q // BLOCK_STEP), -(-self.seqlen_k // BLOCK_STEP)
        return (self.batch_size, self.nheads, rows, columns)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(nheads, total_q) when varlen, else (batch_size, nheads, seqlen_q)."""
        if self.layout is Layout.VARLEN:
            return (self.nheads, self.total_q)
        return (self.batch_size, self.nheads, self.seqlen_q)


class Inputs(NamedTuple):
    """The tensors of one call, validated against its Problem. Shapes as in the public functions, or of panels."""

    q: Tensor
    k: Tensor  # keys, or the key cache
    v: Tensor  # values, or the value cache
    cu_seqlens_q: Tensor | None = None  # int32 (batch_size + 1,)
    cu_seqlens_k: Tensor | None = None  # int32 (batch_size + 1,)
    block_table: Tensor | None = None  # int32 (batch_size, max_blocks_per_seq)
    alibi_slopes: Tensor | None = None  # float32 (nheads,) or (batch_size, nheads)
    attn_bias: Tensor | None = None  # expanded: (batch_size, nheads, seqlen_q, seqlen_k) or (nheads, total_q, seqlen_k)
    sinks: Tensor | None = None  # float32 (nheads,)
    dropout_seed: Tensor | None = None  # int64 scalar: the seed of dropout (backends/common/dropout.py)
    block_mask: Tensor | None = None  # bool, expanded: Problem.blocks_shape, any strides; True where a block is kept
    # Pairs that kept blocks hide, by tiles of 64 queries and 64 keys (mask_tiles.py).
    tile_index: Tensor | None = None  # int32, expanded: Problem.tiles_shape, any strides; -1 where a tile hides nothing
    tile_bits: Tensor | None = None  # int64 (tiles, 64), contiguous
    # float32, as k without its last axis: the scales of quantized pages or of a quantized cache. Where a backend has
    # quantized keys for int8 products, each scale serves KEYS_OF_SCALE keys (quantized.py): (batch_size, groups,
    # nheads_k).
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    # The fields below belong to calls with a cache, or are made by backends.
    cache_seqlens: Tensor | None = None  # int32 (batch_size,), tokens in the cache before this call appends
    cache_batch_idx: Tensor | None = None  # int32 (batch_size,)
    cache_leftpad: Tensor | None = None  # int32 (batch_size,)
    k_new: Tensor | None = None  # (batch_size, seqlen_new, nheads_k, headdim)
    v_new: Tensor | None = None  # (batch_size, seqlen_new, nheads_k, headdim_v)
    rotary_cos: Tensor | None = None  # (seqlen_rotary, rotary_dim / 2), dtype of q
    rotary_sin: Tensor | None = None
    q_scale: Tensor | None = None  # float32, as lse: scales of queries that a backend has quantized for int8 products
    q_shift: Tensor | None = None  # as q_scale: products of queries with the mean that was subtracted from keys


class OutputGradients(NamedTuple):
    """The gradients that a backward starts from. Either may be None, but not both. Backends get contiguous ones."""

    out: Tensor | None  # as AttentionOutput.out
    lse: Tensor | None  # as AttentionOutput.lse


class MergeProblem(NamedTuple):
    """One call of merge_attn_states without the values of its tensors; any number of parts."""

    out_shape: tuple[int, ...]  # (batch_size, seqlen_q, nheads, headdim_v), or (total_q, nheads, headdim_v)
    dtype: torch.dtype  # of out
    device: torch.device
    needs_grad: bool


class AttentionOutput(NamedTuple):
    """The results of a backend."""

    out: Tensor  # Problem.out_shape, dtype of q, contiguous
    lse: Tensor | None  # float32 Problem.lse_shape, contiguous, or None when not asked for
    # The weights, negative where dropped, with Problem.return_mask: (batch_size, nheads, seqlen_q, seqlen_k), dtype of
    # q.
    dropout_mask: Tensor | None = None
