"""Calls with a cache that divide tokens as varlen calls do: cu_seqlens_q, cu_seqlens_k_new and attention_chunk.

Attention is a varlen call over pages, of which a sequence uses the tokens before the call and its new ones. A cache of
rows is read as pages too, one page a row. New tokens are appended before, each as a sequence of its own with one page.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.operators import ATTENTION_KVCACHE
from fastattention.attention.rows import Rows, as_rows
from fastattention.attention.validation import KvCacheArguments, Options, lengths
from fastattention.engine.checks import check_index, check_rank, read_int, spec_of
from fastattention.engine.eager import runs_eagerly
from fastattention.errors import ArgumentError, UnsupportedError

# Arguments that do not go with those above -> what to do.
_REFUSED = {
    "rotary_cos": "rotate q and k before the call",
    "cache_leftpad": "let sequences begin at the first token of a row, or of a page",
    "attn_bias": "give fast_attn_varlen_func the cache as pages, with block_table",
}


class RaggedCache(NamedTuple):
    """Caches as pages, the queries of a call, and what it appends."""

    queries: Rows
    k_cache: Tensor  # (num_blocks, page_block_size, nheads_k, headdim)
    v_cache: Tensor
    pages: Tensor  # int32 (batch_size, max_blocks_per_seq)
    before: Tensor  # int32 (batch_size,), tokens of each sequence before the call
    used: Tensor  # int32 (batch_size,), those after it
    scales: tuple[Tensor | None, Tensor | None]  # of quantized caches, shaped as they without their last axis
    k: Rows | None  # new tokens
    v: Rows | None

    @property
    def capacity(self) -> int:
        """Tokens that a sequence has room for."""
        return self.pages.shape[1] * self.k_cache.shape[1]

    def append(self) -> None:
        """Writes the new tokens of each sequence after those that it has."""
        if self.k is None or self.v is None:
            return
        offsets, page_block_size = self.k.cu_seqlens, self.k_cache.shape[1]
        tokens = torch.arange(self.k.rows.shape[0], dtype=torch.int32, device=offsets.device)
        sequences = torch.searchsorted(offsets[1:], tokens, right=True)
        positions = self.before[sequences] + tokens - offsets[sequences]
        # A position without room stays outside of the last page, where the kernel reports it.
        columns = (positions // page_block_size).clamp(max=self.pages.shape[1] - 1)
        no_queries = self.queries.rows.new_empty(len(tokens), 0, *self.k_cache.shape[2:])
        arguments = KvCacheArguments(
            no_queries, self.k_cache, self.v_cache, self.k.rows[:, None], self.v.rows[:, None],
            cache_seqlens=positions - columns * page_block_size, block_table=self.pages[sequences, columns][:, None],
            k_scale=self.scales[0], v_scale=self.scales[1],
        )  # fmt: skip
        ATTENTION_KVCACHE(arguments, Options(), "auto")


class Appending:
    """The operator of a call that appends to a cache before it attends to it. `explain` writes nothing."""

    def __init__(self, operator: Any, cache: RaggedCache) -> None:
        self._operator, self._cache = operator, cache
        self.explain = operator.explain

    def __call__(self, given: Any, options: Any, backend: str) -> Any:
        """Serves the call. When an error is raised, the caches are as they were."""
        if runs_eagerly(*given):
            self._operator.plan(given, options, backend)  # raises for what is wrong or not served
        self._cache.append()
        return self._operator(given, options, backend)


def read_ragged_cache(
    a: KvCacheArguments, cu_seqlens_q: Tensor | None, cu_seqlens_k_new: Tensor | None, max_seqlen_q: int | None
) -> RaggedCache:
    """The cache of a call with these arguments. Writes nothing; raises for what does not fit or go together."""
    for name, remedy in _REFUSED.items():
        if getattr(a, name) is not None:
            raise UnsupportedError(
                f"{name} is not served with cu_seqlens_q, cu_seqlens_k_new or attention_chunk; {remedy}"
            )
    queries = as_rows("q", a.q, cu_seqlens_q, max_seqlen_q)
    batch_size = spec_of("cu_seqlens_q", queries.cu_seqlens).shape[0] - 1
    pages = _pages(a, batch_size)
    capacity = pages.shape[1] * a.k_cache.shape[1]
    before = _lengths_before(a, batch_size, capacity)
    k = v = None
    used = before
    if not (a.k is a.v is cu_seqlens_k_new is None):
        if a.k is None or a.v is None or a.cache_seqlens is None:
            raise ArgumentError("k, v and cache_seqlens must be given together, and with cu_seqlens_k_new")
        k, v = (as_rows(name, new, cu_seqlens_k_new) for name, new in (("k", a.k), ("v", a.v)))
        used = before + _counts(a.q, k, batch_size)
    if lengths.are_checked(a.q) and runs_eagerly(a.q, a.k_cache, a.v_cache, before, used):
        _check_room(before.tolist(), used.tolist(), capacity)
    return RaggedCache(
        queries, a.k_cache, a.v_cache, pages, before, used.clamp(max=capacity), (a.k_scale, a.v_scale), k, v
    )


def _pages(a: KvCacheArguments, batch_size: int) -> Tensor:
    """The pages of each sequence, int32 (batch_size, max_blocks_per_seq). Rows of a cache are pages of their length."""
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        check_rank(name, spec_of(name, cache), "batch_size_cache, seqlen_cache, nheads_k, headdim")
    q = spec_of("q", a.q)
    if a.cache_batch_idx is not None:
        check_index("cache_batch_idx", spec_of("cache_batch_idx", a.cache_batch_idx), q, (batch_size,), "batch_size")
        if a.block_table is not None:
            raise ArgumentError("cache_batch_idx cannot be combined with block_table; index the rows of block_table")
        return a.cache_batch_idx[:, None]
    if a.block_table is None:
        if a.k_cache.shape[0] != batch_size:
            raise ArgumentError(
                f"k_cache holds {a.k_cache.shape[0]} sequences and q {batch_size}; they must be the same, or give "
                "cache_batch_idx to choose among them"
            )
        return torch.arange(batch_size, dtype=torch.int32, device=q.device)[:, None]
    check_index("block_table", spec_of("block_table", a.block_table), q, (batch_size, -1), "batch_size, max_blocks")
    return a.block_table


def _lengths_before(a: KvCacheArguments, batch_size: int, capacity: int) -> Tensor:
    """Tokens of each sequence before the call, int32 (batch_size,). None is a full cache."""
    seqlens = a.cache_seqlens
    if isinstance(seqlens, Tensor):
        check_index("cache_seqlens", spec_of("cache_seqlens", seqlens), spec_of("q", a.q), (batch_size,), "batch_size")
        return seqlens
    length = capacity if seqlens is None else read_int("cache_seqlens", seqlens)
    return torch.full((batch_size,), length, dtype=torch.int32, device=a.q.device)


def _counts(q: Tensor, new: Rows, batch_size: int) -> Tensor:
    """New tokens of each sequence."""
    offsets, name = new.cu_seqlens, "cu_seqlens_k_new"
    check_index(name, spec_of(name, offsets), spec_of("q", q), (batch_size + 1,), "batch_size + 1")
    if lengths.are_checked(q) and runs_eagerly(q, new.rows, offsets):
        lengths.check_cu_seqlens(name, offsets, new.rows.shape[0])
    return offsets.diff()


def _check_room(before: list[int], after: list[int], capacity: int) -> None:
    for index, (held, used) in enumerate(zip(before, after, strict=True)):
        if held < 0 or used > capacity:
            raise ArgumentError(
                f"cache_seqlens[{index}]={held} must be 0 to {capacity - (used - held)}: the cache has room for "
                f"{capacity} tokens, {used - held} of them for k and v"
            )
