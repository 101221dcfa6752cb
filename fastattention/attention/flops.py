"""Floating-point operations of the operators, for torch.utils.flop_counter, counted as torch counts its own attention.

Masks do not lessen them: torch counts causal attention, windows and biases as full attention, and so are block masks
counted. Sequences of a varlen batch count with their own lengths, and those of a cache with the tokens that it holds
after the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def register() -> None:
    """Tells torch's counter of the operators, which must exist."""
    operators = torch.ops.fastattention
    register_flop_formula(operators.attention, get_raw=True)(_attention)
    register_flop_formula(operators.attention_backward, get_raw=True)(_attention_backward)
    register_flop_formula(operators.attention_kvcache, get_raw=True)(_attention_kvcache)


def _attention(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **_: Any) -> int:
    cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k) = arguments[0], arguments[1], arguments[8:10]
    pairs = _pairs(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * pairs * q.shape[-2] * (q.shape[-1] + v.shape[-1])  # q @ k^T and weights @ v


def _attention_backward(_: Any, __: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **___: Any) -> int:
    cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k) = arguments[0], arguments[1], arguments[10:12]
    pairs = _pairs(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return 2 * pairs * q.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])  # the scores again, then dV, dP, dQ, dK


def _attention_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, *arguments: Any, **_: Any) -> int:
    cache_seqlens, block_table = arguments[3], arguments[6]
    batch_size, seqlen_q, nheads, headdim = q.shape
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if cache_seqlens is None or not _has_numbers(cache_seqlens):
        keys = batch_size * capacity
    else:
        keys = int(cache_seqlens.sum()) + (0 if k is None else batch_size * k.shape[1])
    return int(2 * seqlen_q * keys * nheads * (headdim + v_cache.shape[-1]))


def _pairs(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> int:
    """Pairs of a query and a key of one sequence. Where offsets have no numbers all sequences count as the longest."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return int(q.shape[0] * q.shape[1] * k.shape[1])
    if _has_numbers(cu_seqlens_q) and _has_numbers(cu_seqlens_k):
        return int((cu_seqlens_q.diff().long() * cu_seqlens_k.diff().long()).sum())
    longest_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    longest_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    return int((cu_seqlens_q.shape[0] - 1) * longest_q * longest_k)


def _has_numbers(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta
