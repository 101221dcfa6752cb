"""Functions of FlashAttention-4, the module flash_attn.cute: its order of arguments, computed by fastattention.

- `num_splits`, `pack_gqa`, `min_seqlen_k`, `scheduler_metadata`, `seqlen_k_per_split` and `disable_scheduler_metadata`
  are hints about speed: they change no result and are not read.
- `window_size` is (left, right), None is unlimited, and a window without any key is unlimited on both sides.
- `qv` adds qv @ v^T to the scores, at the cost of a copy of the keys and values.
- Functions of scores (`score_mod`, `mask_mod`), `block_sparse_tensors` and `gather_kv_indices` raise UnsupportedError.

All functions return (out, lse). lse is None without return_lse. It is (batch_size, nheads, seqlen_q) or (nheads,
total_q), with `qv` (batch_size, seqlen_q, nheads) or (total_q, nheads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastattention.attention.interface import fast_attn_func, fast_attn_varlen_func
from fastattention.engine.checks import read_int, require_tensor
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.flash_attn.arguments import refuse, refuse_float8, with_values_in_keys

Window = Sequence[int | None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`fast_attn_func`, whose sinks are learnable_sink. Returns (out, lse), where lse is None without return_lse."""
    refuse(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd, gather_kv_indices=gather_kv_indices,
    )  # fmt: skip
    refuse_float8(q)
    q, k, v, heads_last = _latent(q, k, v, qv)
    result = fast_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=_read_window(window_size, causal),
        softcap=softcap, deterministic=deterministic, sinks=learnable_sink, return_lse=return_lse,
    )  # fmt: skip
    return _out_and_lse(result, heads_last)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: object = None,
    aux_tensors: list[Tensor] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: object = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`fast_attn_varlen_func`, whose sinks are learnable_sink. Returns (out, lse); lse is None without return_lse."""
    refuse(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors, gather_kv_indices=gather_kv_indices,
        seqused_q=seqused_q, seqused_k=seqused_k, page_table=page_table,
    )  # fmt: skip
    refuse_float8(q)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise UnsupportedError(
            "cu_seqlens_q and cu_seqlens_k must be given; for sequences of one length call flash_attn_func"
        )
    q, k, v, heads_last = _latent(q, k, v, qv)
    # Without a longest sequence, take a bound: finding the longest one would synchronize.
    result = fast_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        k.shape[0] if max_seqlen_k is None else max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=_read_window(window_size, causal), softcap=softcap, deterministic=deterministic,
        sinks=learnable_sink, return_lse=return_lse,
    )  # fmt: skip
    return _out_and_lse(result, heads_last)


def _latent(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k and v of a call with qv, and whether FlashAttention-4 puts heads last in lse.

    Keys and values that are one tensor with 512 columns are latents: only qv meets them, or q without qv.
    """
    require_tensor("v", v)
    if k is v and v.shape[-1] == 512:
        return (q if qv is None else qv), k, v, True
    if qv is None:
        return q, k, v, False
    return *with_values_in_keys(q, k, v, qv), True


def _read_window(window_size: Window, causal: bool) -> tuple[int, int]:
    """(left, right) with -1 for unlimited. Raises UnsupportedError for other negative sides."""
    try:
        left, right = (None if side is None else read_int("window_size", side) for side in window_size)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"window_size must be (left, right), integers or None, got {window_size!r}") from error
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return -1, -1
    if min(left or 0, right or 0) < 0:
        raise UnsupportedError(
            f"window_size={window_size!r} hides keys on both sides of the diagonal, or the diagonal itself; each side "
            "must be None or at least 0"
        )
    return (-1 if left is None else left), (-1 if right is None else right)


def _out_and_lse(result: Any, heads_last: bool) -> tuple[Tensor, Tensor | None]:
    """(out, lse) from what a function returns: out, or (out, lse)."""
    if isinstance(result, Tensor):
        return result, None
    out, lse = result
    return out, lse.transpose(-1, -2) if heads_last else lse


INTERFACE = {function.__name__: function for function in (flash_attn_func, flash_attn_varlen_func)}
