"""The attention function of a layer, under a mask of masks.py, a tensor, or none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import logging

from fastattention.attention.interface import fast_attn_func
from fastattention.engine.eager import autocast_dtype
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.pair_masks import pair_mask_of
from fastattention.integrations.transformers.block_sparse import prefill_functions
from fastattention.integrations.transformers.latents import Latents
from fastattention.integrations.transformers.masks import (
    AT_ONCE,
    DenseMask,
    Functions,
    Scores,
    SelectedKeys,
    SequenceMask,
    Window,
    attend_dense,
    attend_varlen,
    combine,
)
from fastattention.integrations.transformers.selected import (
    attend_to_blocks,
    attend_to_gathered,
    attend_to_selected,
    check_selected,
    check_sequences,
    selects_few,
    with_selected,
)
from fastattention.integrations.transformers.stored import StoredTokens

# Arguments by which sparse and gated models change the softmax. Nothing else shows such a change.
UNKNOWN_ARGUMENTS = ("sinks",)
_VARLEN_ARGUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_MEANINGFUL = frozenset((*UNKNOWN_ARGUMENTS, *_VARLEN_ARGUMENTS, "output_attentions"))
_log = logging.get_logger(__name__)


def fast_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | StoredTokens | Latents,
    value: Tensor | StoredTokens | Latents,
    attention_mask: SequenceMask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    functions: Functions = AT_ONCE,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as Transformers' AttentionInterface asks for it.

    query: (batch_size, nheads, seqlen_q, headdim)
    key, value: (batch_size, nheads_k, seqlen_k, headdim or headdim_v); nheads_k divides nheads, heads are not repeated.
        A FastAttentionCache gives StoredTokens in their place, to which new tokens are appended. Models that cache
        latents give Latents.
    attention_mask: what the mask function returned; or a tensor that broadcasts to (batch_size, nheads, seqlen_q,
        seqlen_k), bool (True is seen) or added to the scores. Either alone decides what is seen. For None, is_causal
        (by default the module's attribute) and sliding_window (in keys, the query's own included) decide.
    dropout, scaling, softcap: dropout_p, softmax_scale and softcap of fast_attn_func; softcap None is off
    s_aux: sinks, (nheads,)
    position_bias: broadcasts to (batch_size, nheads, seqlen_q, seqlen_k), added to the scores
    indices: integers (batch_size, seqlen_q, topk), keys that an indexer (of DeepSeek-V3.2) selected for each query, -1
        for none. A query sees only those of them that attention_mask shows to it.
    block_indices: the same for each key head, (batch_size, nheads_k, seqlen_q, topk), of blocks of keys of the size
        module.indexer.block_size (MiniMax-M3)
    functions: the functions that compute it
    kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k of a varlen batch. Others are
        ignored, unless they would change the result.
    Returns (out, None): out is (batch_size, seqlen_q, nheads, headdim_v); there are no weights to return.
    Warns once of output_attentions. Raises UnsupportedError for the arguments of sparse models, ArgumentError for masks
    that do not fit.
    """
    has_more = not _MEANINGFUL.isdisjoint(kwargs)
    sequences = _varlen_sequences(kwargs) if has_more else None
    if has_more:
        _check_unsupported(kwargs)
        if sequences is not None and not (indices is None and block_indices is None):
            check_sequences(attention_mask)
    if isinstance(attention_mask, SelectedKeys):
        indices = attention_mask.indices
    if indices is not None:
        check_selected(attention_mask, indices, query, key)
        if indices.shape[-1] >= key.shape[2]:
            indices = None  # all keys are selected that the mask shows
    if isinstance(key, Latents):
        if key.is_expanded_for(query, None if indices is None else indices.shape[-1]):
            key, value = key.expanded()
        else:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            if indices is not None and selects_few(key, attention_mask, indices) and not dropout:
                gathered = attend_to_gathered(key, key.absorbed(query), indices, scaling, softcap, s_aux)
                return key.projected(gathered), None
            k, v = key.keys_and_values()
            out, _ = fast_attention_forward(
                module, key.absorbed(query), k, v, attention_mask, dropout, scaling, is_causal, sliding_window, softcap,
                s_aux, position_bias, indices, functions=functions, **kwargs,
            )  # fmt: skip
            return key.projected(out), None
    if indices is not None and not isinstance(key, StoredTokens):
        assert attention_mask is not None
        if key.shape[1] == 1 or query.shape[2] == 1:
            assert isinstance(key, Tensor)
            assert isinstance(value, Tensor)
            return attend_to_selected(
                query, key, value, attention_mask, indices, scaling, softcap, s_aux, dropout
            ), None
        attention_mask = with_selected(attention_mask, indices, key.shape[2])
    if block_indices is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        return attend_to_blocks(
            query, key, value, attention_mask, block_indices, size, scaling, softcap, s_aux, dropout
        ), None
    functions = prefill_functions(functions, module, query, key, attention_mask)
    scores = Scores(scaling, softcap or 0.0, s_aux, dropout, functions)
    if isinstance(key, StoredTokens):
        return key.attend(query.transpose(1, 2), attention_mask, position_bias, scores, indices), None
    assert isinstance(value, Tensor)
    dtype = autocast_dtype(query.device.type)
    if dtype is not None:
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(attention_mask, Tensor):
        if position_bias is None and functions.dense is fast_attn_func:
            pairs = pair_mask_of(attention_mask, q, k)
            if pairs is not None:
                return attend_dense(q, k, v, None, scores, block_mask=pairs), None
        return attend_dense(q, k, v, _attn_bias(attention_mask, position_bias, q), scores), None
    if attention_mask is not None and (sequences is None or not isinstance(attention_mask, DenseMask)):
        return attention_mask.attend(q, k, v, position_bias, scores), None
    causal, window = _without_mask(module, is_causal, sliding_window)
    if attention_mask is not None:
        causal, window = attention_mask.causal, attention_mask.window
    if sequences is not None:
        return _attend_sequences(q, k, v, position_bias, scores, causal, window, sequences), None
    if causal and 1 < q.shape[1] != k.shape[1]:
        raise UnsupportedError(
            f"{type(module).__name__} asks for causal attention of {q.shape[1]} queries to {k.shape[1]} keys without "
            "a mask, which leaves open where the queries are among the keys; give an attention_mask of four dimensions"
        )
    return attend_dense(q, k, v, position_bias, scores, causal, window), None


def _check_unsupported(kwargs: dict[str, Any]) -> None:
    for name in UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise UnsupportedError(
                f"this model gives its attention function {name!r}, which fast_attention does not know; "
                "load it with attn_implementation='eager'"
            )
    if kwargs.get("output_attentions"):
        _log.warning_once(
            "fast_attention never makes the matrix of weights that output_attentions=True asks for, and returns None; "
            "load the model with attn_implementation='eager' to get it"
        )


def _without_mask(module: nn.Module, is_causal: bool | None, sliding_window: int | None) -> tuple[bool, Window]:
    """(causal, window) of a layer whose model made no mask."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    left = -1 if sliding_window is None else sliding_window - 1
    return causal, (left, 0 if causal else left)


def _attn_bias(attention_mask: Tensor, position_bias: Tensor | None, q: Tensor) -> Tensor:
    if attention_mask.dim() != 4:
        raise ArgumentError(
            "attention_mask must broadcast to (batch_size, nheads, seqlen_q, seqlen_k) when it reaches a layer, got "
            f"shape {tuple(attention_mask.shape)}; give padding masks of two dimensions to the whole model"
        )
    return combine(attention_mask, position_bias, q.dtype)


class _Sequences(NamedTuple):
    """Variable-length sequences that the caller concatenated."""

    cu_seqlens_q: Tensor  # int32 (number of sequences + 1,)
    cu_seqlens_k: Tensor
    max_seqlen_q: int | None  # None derives it
    max_seqlen_k: int | None


def _varlen_sequences(kwargs: dict[str, Any]) -> _Sequences | None:
    cu_seqlens_q, cu_seqlens_k, *longest = map(kwargs.get, _VARLEN_ARGUMENTS)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    max_seqlen_q, max_seqlen_k = (None if length is None else int(length) for length in longest)
    return _Sequences(cu_seqlens_q.to(torch.int32), cu_seqlens_k.to(torch.int32), max_seqlen_q, max_seqlen_k)


def _attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position_bias: Tensor | None,
    scores: Scores,
    causal: bool,
    window: Window,
    sequences: _Sequences,
) -> Tensor:
    if position_bias is not None:
        raise UnsupportedError("position_bias cannot be combined with cu_seq_lens_q; give an attention_mask instead")
    out = attend_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), scores, causal, window, *sequences)
    return out.view(*q.shape[:-1], v.shape[-1])
