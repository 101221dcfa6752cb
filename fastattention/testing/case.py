"""The fields of a case: one call, described without its tensors. `calls.build_call` makes these."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

# Memory layouts of a tensor (..., tokens, heads, headdim); memory.py makes each.
Memory = Literal[
    "contiguous",
    "heads_major",
    "sliced_heads",
    "every_second_token",
    "sliced_headdim",
    "every_second_element",
    "one_batch_expanded",
    "one_head_expanded",
]

# Layouts of caches, which are used in place, so their last axis is contiguous.
CACHE_MEMORIES: list[Memory] = ["heads_major", "sliced_heads", "every_second_token", "sliced_headdim"]

# Sizes from which kernels take another path: one query, a tile of 16 or 64 rows, several tiles.
PATHS = (1, 16, 64, 256)


def path(size: int) -> int:
    """The path that a size leads to."""
    return sum(size > limit for limit in PATHS)


# Keys that a bias hides: none, random ones, all keys of every third row, or whole columns.
Hidden = Literal["nothing", "entries", "rows", "columns"]


_STORED = {"as_q": None, "int8": torch.int8, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Bias:
    """An attn_bias. `axes` names the axes it has, "1" where it broadcasts: "bhqk", "1h1k", "qk", varlen "htk", "t1"."""

    axes: str
    hides: Hidden = "nothing"
    finite: bool = False  # hides with the lowest finite value, as masks of Transformers do, instead of -inf
    dtype_of_q: bool = False  # otherwise float32
    strided: bool = False  # stored with its last two axes swapped


@dataclass(frozen=True)
class Blocks:
    """A block_mask. `axes`: "b" and "h" for the batch and the heads, "1" where it has one for all."""

    axes: Literal["bh", "1h", "b1", "11"] = "bh"
    size: tuple[int, int] = (64, 64)
    density: float = 0.5  # share of blocks that are kept, drawn at random; 0 keeps none, 1 all
    strided: bool = False  # stored with its last two axes swapped
    pairs: float = 1.0  # share of the pairs in kept blocks that are visible; below 1 the call has a PairMask


@dataclass(frozen=True, kw_only=True)
class Case:
    """Fields that calls of all three layouts share. Defaults are the plainest call."""

    name: str
    nheads: int = 2
    nheads_k: int = 2
    headdim: int = 32
    headdim_v: int | None = None  # None: headdim
    values_in_keys: bool = False  # v is the first columns of k, in the same memory
    memory_q: Memory = "contiguous"
    memory_k: Memory = "contiguous"  # layout of k and v, or of the caches
    magnitude: float = 1.0  # standard deviation of q and k
    softmax_scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: Literal["none", "per_head", "per_sequence"] = "none"
    sinks: bool = False
    bias: Bias | None = None
    blocks: Blocks | None = None  # of calls without a cache
    qk_dtype: Literal["int8"] | None = None  # of calls without a cache
    key_offset: float = 0.0  # standard deviation of what all keys have in common
    dropout_p: float = 0.0  # of calls without a cache
    deterministic: bool = False  # of calls without a cache

    @property
    def headdim_of_v(self) -> int:
        """The head dimension of the values."""
        return self.headdim if self.headdim_v is None else self.headdim_v

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:
        """Axis -> value, by which tests of this list are sampled instead of names. See tiers.py."""
        bias, blocks = self.bias, self.blocks
        return {
            "layout": type(self).__name__,
            "headdim": -(-self.headdim // 32) if self.headdim <= 256 else "wide",
            "headdim_v": (self.headdim_of_v - self.headdim > 0) - (self.headdim_of_v - self.headdim < 0),
            "values_in_keys": self.values_in_keys,
            "memory_q": self.memory_q,
            "memory_k": self.memory_k,
            "large": self.magnitude > 1.0,
            "scaled": self.softmax_scale is not None,
            "causal": self.causal,
            "window": tuple(side >= 0 for side in self.window),
            "softcap": self.softcap > 0.0,
            "alibi": self.alibi,
            "sinks": self.sinks,
            "group": min(self.nheads // max(self.nheads_k, 1), 4),
            "group_rows": (path(self.nheads // max(self.nheads_k, 1)), self.nheads // max(self.nheads_k, 1) % 16 > 0),
            "bias_sides": bias and ("q" in bias.axes or "t" in bias.axes, "k" in bias.axes),
            "bias_heads": bias and ("b" in bias.axes, "h" in bias.axes),
            "hides": bias and bias.hides,
            "bias_stored": bias and (bias.finite, bias.dtype_of_q, bias.strided),
            "blocks": blocks and blocks.axes,
            "block_size": blocks and blocks.size,
            "density": blocks and (0.0 < blocks.density < 1.0, blocks.strided, blocks.pairs < 1.0),
            "qk_dtype": self.qk_dtype,
            "key_offset": self.key_offset,
            "dropout": self.dropout_p > 0.0,
            "deterministic": self.deterministic,
        }


@dataclass(frozen=True, kw_only=True)
class DenseCase(Case):
    """A call of fast_attn_func."""

    seqlen_q: int
    seqlen_k: int
    batch_size: int = 2

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:  # noqa: D102
        return {**super().sampled_by, "seqlen_q": path(self.seqlen_q), "seqlen_k": path(self.seqlen_k)}


@dataclass(frozen=True, kw_only=True)
class VarlenCase(Case):
    """A call of fast_attn_varlen_func; one entry of `seqlens` a sequence."""

    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    page_block_size: int | None = None
    slack: int | None = None  # max_seqlen_q and _k exceed the longest sequences by this much; None lets them be derived
    quantized: Literal["int8", "float8"] | None = None  # dtype of pages; None: that of q

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.seqlens_q)

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """The dtype of quantized pages."""
        return _STORED[self.quantized or "as_q"]

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:  # noqa: D102
        longest = (max(lengths, default=0) for lengths in (self.seqlens_q, self.seqlens_k))
        sizes = dict(zip(("seqlen_q", "seqlen_k"), map(path, longest), strict=True))
        return {
            **super().sampled_by,
            **sizes,
            "page_block_size": self.page_block_size,
            "slack": bool(self.slack),
            "stored": self.quantized,
        }


@dataclass(frozen=True, kw_only=True)
class KvCacheCase(Case):
    """A call of fast_attn_with_kvcache; one entry of `cache_seqlens` a sequence."""

    cache_seqlens: tuple[int, ...]
    seqlen_q: int = 1
    spare: int = 3  # tokens of capacity beyond the longest sequence after the append, at least
    lengths: Literal["tensor", "int", "full"] = "tensor"  # how cache_seqlens is given; "full" is None
    seqlen_new: int = 0
    rotary_dim: int = 0
    rotary_interleaved: bool = True
    batch_idx: bool = False  # the cache has more rows than sequences, and cache_batch_idx chooses among them
    leftpad: tuple[int, ...] | None = None
    page_block_size: int | None = None
    shared_pages: int = 0  # leading pages that all sequences have in common
    num_splits: int = 0
    stored: Literal["as_q", "int8", "float8"] = "as_q"  # dtype of the caches

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return len(self.cache_seqlens)

    @property
    def cache_dtype(self) -> torch.dtype | None:
        """The dtype of quantized caches."""
        return _STORED[self.stored]

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:  # noqa: D102
        return {
            **super().sampled_by,
            "seqlen_q": path(self.seqlen_q),
            "seqlen_k": path(max(self.cache_seqlens, default=0)),
            "lengths": self.lengths,
            "seqlen_new": min(self.seqlen_new, 2),
            "rotary": self.rotary_dim > 0 and ("interleaved" if self.rotary_interleaved else "halves"),
            "batch_idx": self.batch_idx,
            "leftpad": self.leftpad is not None,
            "page_block_size": self.page_block_size,
            "shared_pages": self.shared_pages > 0,
            "num_splits": min(self.num_splits, 2),
            "is_split": max(self.cache_seqlens, default=0) > 1024,
            "stored": self.stored,
        }
