"""fast_attn_latent_func: attention to latents (MLA) by queries that have absorbed the projection of keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastattention.attention.function import attention_function
from fastattention.attention.interface import fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.attention.selected import fast_attn_selected_func
from fastattention.engine.checks import check_rank, read_int, spec_of
from fastattention.errors import ArgumentError


@attention_function
def fast_attn_latent_func(
    q: Tensor,
    latents: Tensor,
    headdim_v: int,
    softmax_scale: float,
    causal: bool = False,
    softcap: float = 0.0,
    *,
    indices: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Any:
    """Exact attention of all heads to one row of latents for each token.

    A latent is a key, and its first headdim_v elements are the value. Models of DeepSeek's kind have 512 of these, the
    compressed token, before 64 that are rotated. Queries have absorbed the projection of keys, and the result still
    needs the projection of values:

        q[h] = concat(W_k[h]^T q_nope[h], q_rope[h]),  value of head h = W_v[h] out[h]

    - `q`: (batch_size, seqlen_q, nheads, headdim); with cu_seqlens_q (total_q, nheads, headdim)
    - `latents`: (batch_size, seqlen_k, headdim); with cu_seqlens_k (total_k, headdim); with block_table pages
        (num_blocks, page_block_size, headdim)
    - `headdim_v`: elements of a latent that are its value
    - `softmax_scale`: that of the heads before absorption, such as (128 + 64) ** -0.5. It is no function of headdim.
    - `indices`: the keys of each query, as in `fast_attn_selected_func`; None means all
    - `seqused_k`: int32 (batch_size,), how many tokens of each sequence there are; None means all. Needed with
        block_table.

    With cu_seqlens_q, latents are varlen too, or pages, unless there are indices. The other arguments, the mask and the
    errors are those of `fast_attn_varlen_func`.

    Returns out (batch_size, seqlen_q, nheads, headdim_v), for varlen queries (total_q, nheads, headdim_v); with
    return_lse (out, lse).
    """
    axes = "total_k, headdim" if cu_seqlens_k is not None else "batch_size, seqlen_k, headdim"
    if block_table is not None:
        axes = "num_blocks, page_block_size, headdim"
    check_rank("latents", spec_of("latents", latents), axes)
    width, size = latents.shape[-1], read_int("headdim_v", headdim_v)
    if not 1 <= size <= width:
        raise ArgumentError(f"headdim_v={size} must be 1 to {width}, the elements of a latent")
    if softmax_scale is None:
        raise ArgumentError("softmax_scale must be a number: that of the heads before absorption, got None")
    k = latents.unsqueeze(-2)
    v = k[..., :size]
    shared: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, "sinks": sinks, "return_lse": return_lse,
        "backend": backend,
    }  # fmt: skip
    if indices is not None:
        return fast_attn_selected_func.request(
            q, k, v, indices, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k,
            block_table=block_table, **shared,
        )  # fmt: skip
    if cu_seqlens_q is not None:
        return fast_attn_varlen_func.request(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table=block_table,
            seqused_k=seqused_k, **shared,
        )  # fmt: skip
    if cu_seqlens_k is not None:
        raise ArgumentError("cu_seqlens_k must come with cu_seqlens_q: queries are a batch of one length without it")
    if block_table is None and seqused_k is None:
        return fast_attn_func.request(q, k, v, **shared)
    if seqused_k is None:
        raise ArgumentError("seqused_k must be given with block_table: it has the lengths of sequences")
    return fast_attn_with_kvcache.request(q, k, v, cache_seqlens=seqused_k, block_table=block_table, **shared)
