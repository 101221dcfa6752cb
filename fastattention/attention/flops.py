"""Floating-point operations of attention, for torch.utils.flop_counter, counted as torch counts its own attention.

Masks do not reduce the count: torch counts causal attention, windows and biases as full attention, and we count block
masks so too. Sequences of a varlen batch count with their own lengths, and those of a cache with the tokens that it
holds after the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def of_prefill(arguments: Mapping[str, Any], backward: bool) -> int:
    """A call without a cache, or its backward. Arguments by name, all but scalars with a default."""
    q, headdim_v = arguments["q"], arguments["v"].shape[-1]
    nheads, headdim = q.shape[-2:]
    # Forward: q @ k^T and weights @ v. Backward: the scores again, then dV, dP, dQ and dK.
    columns = 3 * headdim + 2 * headdim_v if backward else headdim + headdim_v
    return int(2 * _pairs(arguments) * nheads * columns)


def of_kvcache(arguments: Mapping[str, Any]) -> int:
    """A call with a cache. Arguments by name."""
    q, k_cache, k, block_table = (arguments[name] for name in ("q", "k_cache", "k", "block_table"))
    batch_size, seqlen_q, nheads, headdim = q.shape
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    cache_seqlens = arguments["cache_seqlens"]
    if cache_seqlens is None or not _has_values(cache_seqlens):
        keys = batch_size * capacity
    else:
        keys = int(cache_seqlens.sum()) + (0 if k is None else batch_size * k.shape[1])
    return int(2 * seqlen_q * keys * nheads * (headdim + arguments["v_cache"].shape[-1]))


def _pairs(arguments: Mapping[str, Any]) -> int:
    """Pairs of a query and a key of one sequence. Without values of offsets, every sequence counts as the longest."""
    q, k, offsets_q, offsets_k = (arguments[name] for name in ("q", "k", "cu_seqlens_q", "cu_seqlens_k"))
    if offsets_q is None or offsets_k is None:
        return int(q.shape[0] * q.shape[1] * k.shape[1])
    if _has_values(offsets_q) and _has_values(offsets_k):
        return int((offsets_q.diff().long() * offsets_k.diff().long()).sum())
    longest_q, longest_k = arguments.get("max_seqlen_q"), arguments.get("max_seqlen_k")
    longest_q = q.shape[0] if longest_q is None else longest_q
    longest_k = k.shape[0] if longest_k is None else longest_k
    return int((offsets_q.shape[0] - 1) * longest_q * longest_k)


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta
