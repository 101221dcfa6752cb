"""Functions of FlashAttention-4, the module flash_attn.cute: its order of arguments, computed by fastattention.

- `num_splits`, `pack_gqa`, `min_seqlen_k`, `scheduler_metadata`, `seqlen_k_per_split` and `disable_scheduler_metadata`
  are hints about speed: they change no result and are not read.
- `window_size` is (left, right), None is unlimited, and a window without any key is unlimited on both sides.
- `qv` adds qv @ v^T to the scores. Keys and values are copied for it, unless they are parts of one tensor in which each
  value is followed by its key.
- `gather_kv_indices` (total_q, topk), or (batch_size, seqlen_q, topk), are the `indices` of `fast_attn_selected_func`.
- Functions of scores (`score_mod`, `mask_mod`) and `block_sparse_tensors` raise UnsupportedError.

All functions return (out, lse). lse is None without return_lse. It is (batch_size, nheads, seqlen_q) or (nheads,
total_q), with `qv` (batch_size, seqlen_q, nheads) or (total_q, nheads).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastattention.attention.interface import fast_attn_func, fast_attn_varlen_func
from fastattention.attention.rows import as_rows
from fastattention.attention.selected import fast_attn_selected_func
from fastattention.engine.checks import check_rank, read_int, require_tensor, spec_of
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
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    refuse_float8(q)
    q, k, v, heads_last = _latent(q, k, v, qv)
    window = _read_window(window_size, causal)
    if gather_kv_indices is not None:
        _check_selected(window)
        result = fast_attn_selected_func(
            q, k, v, gather_kv_indices, softmax_scale, causal, softcap, sinks=learnable_sink, return_lse=return_lse
        )
        return _out_and_lse(result, heads_last)
    result = fast_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window, softcap=softcap,
        deterministic=deterministic, sinks=learnable_sink, return_lse=return_lse,
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
    """`fast_attn_varlen_func`, whose sinks are learnable_sink and whose block_table is page_table.

    - `q`, `qv`: (total_q, nheads, headdim), or without cu_seqlens_q (batch_size, seqlen_q, nheads, headdim)
    - `k`, `v`: (total_k, nheads_k, headdim), or without cu_seqlens_k (batch_size, seqlen_k, nheads_k, headdim), or with
        page_table and seqused_k pages (num_blocks, page_block_size, nheads_k, headdim)

    Returns (out, lse) in the layout of q. lse is None without return_lse.
    """
    refuse(
        score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    refuse_float8(q)
    q, k, v, heads_last = _latent(q, k, v, qv, copies=page_table is None)
    window = _read_window(window_size, causal)
    if gather_kv_indices is not None:
        _check_selected(window, seqused_q)
        result = fast_attn_selected_func(
            q, k, v, gather_kv_indices, softmax_scale, causal, softcap, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, block_table=page_table, sinks=learnable_sink,
            return_lse=return_lse,
        )  # fmt: skip
        return _out_and_lse(result, heads_last)
    queries = as_rows("q", q, cu_seqlens_q, max_seqlen_q)
    if page_table is not None:
        if cu_seqlens_k is not None or seqused_k is None:
            raise ArgumentError("page_table needs seqused_k, the lengths of sequences, and no cu_seqlens_k")
        check_rank("k", spec_of("k", k), "num_blocks, page_block_size, nheads_k, headdim")
        longest = spec_of("page_table", page_table).shape[-1] * k.shape[1]
    else:
        keys, values = (as_rows(name, tensor, cu_seqlens_k, max_seqlen_k) for name, tensor in (("k", k), ("v", v)))
        k, v, cu_seqlens_k, longest = keys.rows, values.rows, keys.cu_seqlens, keys.longest
    result = fast_attn_varlen_func(
        queries.rows, k, v, queries.cu_seqlens, cu_seqlens_k, queries.longest, longest, softmax_scale=softmax_scale,
        causal=causal, window_size=window, softcap=softcap, deterministic=deterministic, block_table=page_table,
        seqused_q=seqused_q, seqused_k=seqused_k, sinks=learnable_sink, return_lse=return_lse,
    )  # fmt: skip
    return _out_and_lse(queries.back(result), heads_last)


def _latent(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, copies: bool = True
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """q, k and v of a call with qv, and whether FlashAttention-4 puts heads last in lse.

    Keys and values that are one tensor with 512 columns are latents: only qv meets them, or q without qv.
    """
    require_tensor("v", v)
    if k is v and v.shape[-1] == 512:
        return (q if qv is None else qv), k, v, True
    if qv is None:
        return q, k, v, False
    return *with_values_in_keys(q, k, v, qv, copies), True


def _check_selected(window: tuple[int, int], seqused_q: Tensor | None = None) -> None:
    """Raises UnsupportedError for what fast_attn_selected_func has no argument for."""
    if window not in ((-1, -1), (-1, 0)):
        raise UnsupportedError(
            f"window_size={window} is not served with gather_kv_indices; name the keys of the window"
        )
    if seqused_q is not None:
        raise UnsupportedError("seqused_q is not served with gather_kv_indices; give -1 for the keys of unused queries")


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
