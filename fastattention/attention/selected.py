"""fast_attn_selected_func: attention to the keys that each query selects, as indexers of sparse attention choose them.

A selected key is a page of one token, and a query a sequence of its own whose block table are its indices. So such a
call is one with a cache of pages (fast_attn_with_kvcache). Every backend that reads pages serves it, and its cost is
proportional to the number of selected keys. No tensor has a row of all keys for each query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.attention.function import attention_function
from fastattention.attention.key_tokens import KeyTokens
from fastattention.attention.operators import ATTENTION_KVCACHE
from fastattention.attention.problem import AttentionOutput
from fastattention.attention.rows import Rows, as_rows
from fastattention.attention.validation import KvCacheArguments, lengths
from fastattention.attention.validation.common import read_options
from fastattention.engine.checks import check_device, read_flag, spec_of
from fastattention.engine.eager import runs_eagerly
from fastattention.engine.kinds import check_readable
from fastattention.errors import ArgumentError


@attention_function
def fast_attn_selected_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention of each query to the keys that its indices name, for all heads.

    - `q`: (batch_size, seqlen_q, nheads, headdim); with cu_seqlens_q (total_q, nheads, headdim)
    - `k`: (batch_size, seqlen_k, nheads_k, headdim); with cu_seqlens_k (total_k, nheads_k, headdim); with block_table
        pages (num_blocks, page_block_size, nheads_k, headdim)
    - `v`: as k, with headdim_v; or `k[..., :headdim_v]`, as in latent attention
    - `indices`: int32 or int64 (batch_size, seqlen_q, topk), with cu_seqlens_q (total_q, topk): positions of keys
        within the sequence of the query, in any order. -1 is no key. A key that is named twice counts twice.
    - `causal`: drops keys behind the query; aligned to the bottom right, so the last query may see every key.
    - `seqused_k`: int32 (batch_size,), how many tokens of each sequence there are; None means all. Needed with
        block_table, whose rows may hold more.

    Queries and keys of one call may be varlen or not, independently. The other arguments are those of all functions.
    Keys at or after the end of their sequence are errors on the CPU. On a GPU they are dropped, as -1 is. There is no
    backward. A query without keys gives out 0 and lse -inf.

    Returns out (batch_size, seqlen_q, nheads, headdim_v), for varlen queries (total_q, nheads, headdim_v); with
    return_lse (out, lse), lse as of the other functions. Raises as they do.
    """
    try:
        queries = as_rows("q", q, cu_seqlens_q)
        tokens = KeyTokens.of({"k": k, "v": v}, "nheads_k, headdim", cu_seqlens_k, block_table, seqused_k)
        keys = _KeySlots.of(tokens, k=k, v=v, k_scale=k_scale, v_scale=v_scale)
        chosen = _chosen(queries, keys, indices, read_flag("causal", causal))
    except (RuntimeError, TypeError):
        check_readable({"q": q, "k": k, "v": v, "indices": indices})
        raise
    given = KvCacheArguments(
        queries.rows[:, None], keys.k, keys.v, cache_seqlens=chosen.counts, block_table=chosen.slots, sinks=sinks,
        k_scale=keys.k_scale, v_scale=keys.v_scale,
    )  # fmt: skip
    options = read_options(softmax_scale, False, (-1, -1), softcap, return_lse=return_lse)

    def returned(result: AttentionOutput) -> Any:
        out = result.out[:, 0]
        if not return_lse:
            return queries.back(out)
        assert result.lse is not None
        return queries.back((out, result.lse[..., 0].T.contiguous()))

    return ATTENTION_KVCACHE, given, options, backend, returned


class _KeySlots(NamedTuple):
    """Keys and values as pages of one token: slots. The slots of a sequence, or of a given page, follow one another."""

    tokens: KeyTokens
    step: int  # slots from a row of the batch, or a page, to the next
    k: Tensor  # (num_slots, 1, nheads_k, headdim)
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @classmethod
    def of(cls, tokens: KeyTokens, **tensors: Tensor | None) -> _KeySlots:
        """The slots of keys and values, without copying them where tokens of all sequences have slots of one size."""
        given = {name: x for name, x in tensors.items() if x is not None}
        k, v = given["k"], given["v"]
        if k.shape[:-2] != v.shape[:-2]:
            raise ArgumentError(f"k and v must hold the same tokens, got shapes {tuple(k.shape)} and {tuple(v.shape)}")
        if tokens.cu_seqlens is not None:
            return cls(tokens, 0, **{name: x[:, None] for name, x in given.items()})
        in_keys = runs_eagerly(k, v) and _is_part(v, k)
        apart = [x for name, x in given.items() if not (in_keys and name == "v")]
        slots, step = _as_slots(apart)
        if in_keys:  # with the strides of k, also on axes of size 1: kernels then read shared memory once
            slots.insert(1, slots[0][..., : v.shape[-1]])
        return cls(tokens, step, **dict(zip(given, slots, strict=True)))


def _is_part(v: Tensor, k: Tensor) -> bool:
    """Whether v is the first columns of k."""
    axes = [axis for axis, size in enumerate(k.shape) if size != 1]
    strides = [(k.stride(axis), v.stride(axis)) for axis in axes]
    return v.data_ptr() == k.data_ptr() and v.shape[-1] <= k.shape[-1] and all(a == b for a, b in strides)


def _as_slots(tensors: list[Tensor]) -> tuple[list[Tensor], int]:
    """Tensors (batch_size, seqlen, ...) as (num_slots, 1, ...), and the slots from a sequence to the next."""
    batch_size, seqlen = tensors[0].shape[:2]
    steps = {divmod(x.stride(0), x.stride(1) or 1) for x in tensors}
    (step, rest), *others = steps
    if others or rest or step == seqlen or batch_size < 2 or not runs_eagerly(*tensors):
        return [x.flatten(0, 1)[:, None] for x in tensors], seqlen
    # Rows of a cache with room for more tokens: all of its slots are one tensor.
    num_slots = (batch_size - 1) * step + seqlen
    return [
        x.as_strided((num_slots, 1, *x.shape[2:]), (x.stride(1), x.stride(1), *x.stride()[2:])) for x in tensors
    ], step


class _Chosen(NamedTuple):
    """The keys of each query."""

    slots: Tensor  # int32 (total_q, topk): the first `counts` of each row are slots, in the order of indices
    counts: Tensor  # int32 (total_q,)


def _chosen(queries: Rows, keys: _KeySlots, indices: Tensor, causal: bool) -> _Chosen:
    """Drops what is no key, and finds the slots of the others."""
    q = spec_of("q", queries.rows)
    total_q, batch_size = q.shape[0], queries.cu_seqlens.shape[0] - 1
    if queries.batch is not None and spec_of("indices", indices).shape[:2] == queries.batch:
        indices = indices.flatten(0, 1)
    found = spec_of("indices", indices)
    if found.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"indices must be int32 or int64, got {found.dtype}")
    check_device("indices", found, q)
    if len(found.shape) != 2 or found.shape[0] != total_q:
        raise ArgumentError(
            f"indices must be (batch_size, seqlen_q, topk), or (total_q, topk), got {tuple(found.shape)}"
        )
    rows = torch.arange(total_q, dtype=torch.int32, device=q.device)
    sequences = torch.searchsorted(queries.cu_seqlens[1:], rows, right=True)
    tokens = keys.tokens
    lengths_k = tokens.lengths(q, batch_size)
    is_checked = lengths.are_checked(queries.rows) and runs_eagerly(queries.rows, indices)
    if is_checked:
        lengths.check_cu_seqlens("cu_seqlens_q", queries.cu_seqlens, total_q)
        tokens.check_numbers(batch_size)
    limits = lengths_k[sequences]
    if is_checked:
        _check_indices(indices, limits)
    if causal:
        limits = limits - (queries.cu_seqlens[1:][sequences] - 1 - rows)
    seen = (indices >= 0) & (indices < limits[:, None])
    places = seen.cumsum(1)
    positions = torch.where(seen, indices, 0)
    if tokens.block_table is not None:
        pages = tokens.block_table[sequences[:, None], positions // tokens.seqlen]
        slots = pages * keys.step + positions % tokens.seqlen
    else:
        first = sequences * keys.step if tokens.cu_seqlens is None else tokens.cu_seqlens[sequences]
        slots = first[:, None] + positions
    # Keys that are dropped go to a column behind those of each row.
    topk = indices.shape[1]
    table = torch.zeros(total_q, topk + 1, dtype=torch.int32, device=q.device)
    table.scatter_(1, torch.where(seen, places - 1, topk), slots.to(torch.int32))
    return _Chosen(table[:, :topk], seen.sum(1, dtype=torch.int32))


def _check_indices(indices: Tensor, lengths_k: Tensor) -> None:
    wrong = (indices < -1) | (indices >= lengths_k[:, None])
    if wrong.any():
        row, column = (int(x) for x in wrong.nonzero()[0])
        key, count = int(indices[row, column]), int(lengths_k[row])
        raise ArgumentError(f"indices name key {key} for query {row}, whose sequence has {count} keys; -1 is no key")
