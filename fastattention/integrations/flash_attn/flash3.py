"""Functions of FlashAttention-3, the module flash_attn_interface: its order of arguments, computed by fastattention.

- `pack_gqa`, `sm_margin` and `scheduler_metadata` are hints about speed, as `num_splits` is for prompts: they change
  no result and are not read.
- `q_descale`, `k_descale` and `v_descale` concern queries in float8, which are refused. FlashAttention-3 does not read
  them for other dtypes, and neither do these functions.
- `qv` adds qv @ v^T to the scores, at the cost of a copy of the keys and values.
- Gradients exist wherever fastattention has them.

Whatever changes results and is not served raises UnsupportedError with its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastattention.attention.interface import (
    WindowSize,
    fast_attn_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_with_kvcache,
)
from fastattention.attention.merge import merge_attn_states
from fastattention.engine.checks import check_rank, check_shape, read_int, require_tensor, spec_of
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.flash_attn.arguments import refuse, refuse_float8, with_values_in_keys


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`fast_attn_func`. Returns out, or with return_attn_probs (out, lse)."""
    refuse_float8(q)
    if qv is not None:
        q, k, v = with_values_in_keys(q, k, v, qv)
    return fast_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, attention_chunk=attention_chunk, return_lse=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`fast_attn_varlen_func`. Returns out, or with return_attn_probs (out, lse)."""
    refuse_float8(q)
    if qv is not None:
        q, k, v = with_values_in_keys(q, k, v, qv)
    return fast_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, deterministic=deterministic, return_lse=return_attn_probs,
        seqused_q=seqused_q, seqused_k=seqused_k, attention_chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`fast_attn_qkvpacked_func`, or with num_heads_q heads of queries, keys and values in one axis.

    - `qkv`: (batch_size, seqlen, 3, nheads, headdim), or (batch_size, seqlen, num_heads_q + 2 * nheads_k, headdim)

    Returns out, or with return_attn_probs (out, lse).
    """
    require_tensor("qkv", qkv)
    if qkv.dim() == 4:
        return flash_attn_func(
            *_split_heads(qkv, num_heads_q), softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
            attention_chunk, softcap, deterministic=deterministic, return_attn_probs=return_attn_probs,
        )  # fmt: skip
    refuse_float8(qkv)
    return fast_attn_qkvpacked_func(
        qkv, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=deterministic, attention_chunk=attention_chunk, return_lse=return_attn_probs,
    )  # fmt: skip


def _split_heads(qkv: Tensor, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v in a tensor that has their heads one after another."""
    nheads = qkv.shape[2]
    nheads_q = read_int("num_heads_q", num_heads_q, "the number of query heads for a qkv of four axes")
    if not (0 < nheads_q < nheads and (nheads - nheads_q) % 2 == 0):
        raise ArgumentError(
            f"num_heads_q={nheads_q} does not fit the {nheads} heads of qkv, which must be num_heads_q + 2 * nheads_k"
        )
    first_v = (nheads + nheads_q) // 2
    return qkv[:, :, :nheads_q], qkv[:, :, nheads_q:first_v], qkv[:, :, first_v:]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`fast_attn_with_kvcache`, whose block_table is page_table.

    `qv` needs caches that are parts of one tensor: v_cache is cache[..., :headdim_v] and k_cache the rest of it.

    Returns out, or with return_softmax_lse (out, lse). FlashAttention-3 returns two more tensors then, which its
    documentation does not name: partial results of split-KV.
    """
    refuse(rotary_seqlens=rotary_seqlens)
    refuse_float8(q)
    if qv is not None:
        if rotary_cos is not None:
            raise UnsupportedError("rotary_cos is not served with qv; rotate q and k before the call")
        q, k_cache, v_cache = with_values_in_keys(q, k_cache, v_cache, qv, copies=False)
        if k is not None and v is not None:
            new = spec_of("k", k).shape[:-1]
            check_shape("v", spec_of("v", v), (*new, v_cache.shape[-1]), "as k, with headdim_v")
            k = torch.cat((v, k), dim=-1)
    return fast_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits=num_splits,
        return_softmax_lse=return_softmax_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q, attention_chunk=attention_chunk,
    )  # fmt: skip


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """`merge_attn_states` of attention over parts of the keys.

    - `out_partial`: (num_splits, batch_size, seqlen, nheads, headdim_v)
    - `lse_partial`: float32 (num_splits, batch_size, seqlen, nheads); here tokens come before heads
    - `out`: written when it is given: (batch_size, seqlen, nheads, headdim_v) in out_dtype
    - `out_dtype`: that of the result; None is the one of out_partial

    Returns out and lse (batch_size, seqlen, nheads).
    """
    parts = spec_of("out_partial", out_partial)
    check_rank("out_partial", parts, "num_splits, batch_size, seqlen, nheads, headdim_v")
    check_shape(
        "lse_partial", spec_of("lse_partial", lse_partial), tuple(parts.shape[:-1]), "as out_partial, without headdim_v"
    )
    merged, lse = merge_attn_states(out_partial, lse_partial.transpose(-1, -2))
    merged = merged.to(out_dtype or parts.dtype)
    if out is None:
        return merged, lse.transpose(-1, -2)
    given = spec_of("out", out)
    if given != spec_of("out", merged):
        raise ArgumentError(f"out is {given}; the result is {spec_of('out', merged)}, and they must be the same")
    return out.copy_(merged), lse.transpose(-1, -2)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """An empty int32 tensor on the device of cache_seqlens: kernels here plan their work in each call."""
    require_tensor("cache_seqlens", cache_seqlens)
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


INTERFACE = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
    "flash_attn_combine": flash_attn_combine,
    "get_scheduler_metadata": get_scheduler_metadata,
}
