"""Calls with a cache whose sequences have different numbers of new queries or keys, as FlashAttention-3 has them.

Attention is a varlen call over pages, of which a sequence uses the tokens before the call and its new ones. A cache of
rows is read as pages too, one page a row. New tokens are appended before, each as a sequence of its own with one page.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention.rows import Rows, as_rows
from fastattention.attention.validation import lengths
from fastattention.engine.checks import check_index, check_rank, read_int, spec_of
from fastattention.engine.eager import runs_eagerly
from fastattention.errors import ArgumentError


def attend_to_ragged_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cache_seqlens: Tensor | int | None,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    max_seqlen_q: int | None,
    **options: Any,
) -> Any:
    """Appends k and v to the caches in place, and attends to what they then hold.

    options: those of `fast_attn_varlen_func`

    Returns out, or (out, lse), in the layout of q. When an error is raised, the caches are as they were.
    """
    queries = as_rows("q", q, cu_seqlens_q, max_seqlen_q)
    batch_size = spec_of("cu_seqlens_q", queries.cu_seqlens).shape[0] - 1
    pages = _pages(q, k_cache, v_cache, cache_batch_idx, page_table, batch_size)
    capacity = pages.shape[1] * k_cache.shape[1]
    before = _lengths_before(q, cache_seqlens, batch_size, capacity)
    if not (k is v is cu_seqlens_k_new is None) and (k is None or v is None or cache_seqlens is None):
        raise ArgumentError("k, v and cache_seqlens must be given together, and with cu_seqlens_k_new")
    new_k = None if k is None else as_rows("k", k, cu_seqlens_k_new, None)
    used = before if new_k is None else before + _counts(q, new_k, batch_size)
    if lengths.are_checked(q) and runs_eagerly(q, k_cache, v_cache, before, used):
        _check_room(before.tolist(), used.tolist(), capacity)
    operator, *call, returned = fast_attn_varlen_func.request(
        queries.rows, k_cache, v_cache, queries.cu_seqlens, None, queries.longest, capacity, block_table=pages,
        seqused_k=used.clamp(max=capacity), **options,
    )  # fmt: skip
    if runs_eagerly(*call[0]):
        operator.plan(*call)  # raises for what is wrong or not served
    if new_k is not None and v is not None:
        _append(k_cache, v_cache, new_k, as_rows("v", v, cu_seqlens_k_new, None).rows, pages, before)
    return queries.back(returned(operator(*call)))


def _pages(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_batch_idx: Tensor | None,
    page_table: Tensor | None,
    batch_size: int,
) -> Tensor:
    """The pages of each sequence, int32 (batch_size, max_blocks_per_seq). Rows of a cache are pages of their length."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_rank(name, spec_of(name, cache), "batch_size_cache, seqlen_cache, nheads_k, headdim")
    spec = spec_of("q", q)
    if cache_batch_idx is not None:
        check_index("cache_batch_idx", spec_of("cache_batch_idx", cache_batch_idx), spec, (batch_size,), "batch_size")
        if page_table is not None:
            raise ArgumentError("cache_batch_idx cannot be combined with page_table; index the rows of page_table")
        return cache_batch_idx[:, None]
    if page_table is None:
        if k_cache.shape[0] != batch_size:
            raise ArgumentError(
                f"k_cache holds {k_cache.shape[0]} sequences and q {batch_size}; they must be the same, or give "
                "cache_batch_idx to choose among them"
            )
        return torch.arange(batch_size, dtype=torch.int32, device=q.device)[:, None]
    check_index("page_table", spec_of("page_table", page_table), spec, (batch_size, -1), "batch_size, max_blocks")
    return page_table


def _lengths_before(q: Tensor, cache_seqlens: Tensor | int | None, batch_size: int, capacity: int) -> Tensor:
    """Tokens of each sequence before the call, int32 (batch_size,). None is a full cache."""
    if isinstance(cache_seqlens, Tensor):
        check_index(
            "cache_seqlens", spec_of("cache_seqlens", cache_seqlens), spec_of("q", q), (batch_size,), "batch_size"
        )
        return cache_seqlens
    length = capacity if cache_seqlens is None else read_int("cache_seqlens", cache_seqlens)
    return torch.full((batch_size,), length, dtype=torch.int32, device=q.device)


def _counts(q: Tensor, new: Rows, batch_size: int) -> Tensor:
    """New tokens of each sequence."""
    offsets = new.cu_seqlens
    name = "cu_seqlens_k_new"
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


def _append(k_cache: Tensor, v_cache: Tensor, k: Rows, v: Tensor, pages: Tensor, before: Tensor) -> None:
    """Writes the new tokens of each sequence after those that it has."""
    tokens = torch.arange(k.rows.shape[0], dtype=torch.int32, device=pages.device)
    sequences = torch.searchsorted(k.cu_seqlens[1:], tokens, right=True)
    positions = before[sequences] + tokens - k.cu_seqlens[sequences]
    # A position without room stays outside of the last page, where the kernel reports it.
    columns = (positions // k_cache.shape[1]).clamp(max=pages.shape[1] - 1)
    no_queries = k_cache.new_empty(k.rows.shape[0], 0, *k_cache.shape[2:])
    fast_attn_with_kvcache(
        no_queries, k_cache, v_cache, k.rows[:, None], v[:, None],
        cache_seqlens=positions - columns * k_cache.shape[1], block_table=pages[sequences, columns.long()][:, None],
    )  # fmt: skip
