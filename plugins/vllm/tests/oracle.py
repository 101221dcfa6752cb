"""Attention as vLLM defines it, in plain torch: one request at a time, the whole score matrix at once."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    dtype: torch.dtype,
    *,
    scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: list[float] | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one request's new tokens, which are the last ones of keys and values.

    - `query`: (query_len, num_heads, head_size)
    - `keys`, `values`: (seq_len, num_kv_heads, head_size)
    - `dtype`: that of the matrix products; the softmax is at least in float32

    Returns (query_len, num_heads, head_size) in `dtype`.
    """
    group = query.shape[1] // keys.shape[1]
    q = query.to(dtype).transpose(0, 1)
    k, v = (x.to(dtype).transpose(0, 1).repeat_interleave(group, 0) for x in (keys, values))
    scores = (q @ k.mT).to(torch.promote_types(dtype, torch.float32)) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    query_len, seq_len = scores.shape[1:]
    places = torch.arange(seq_len, device=q.device)
    behind = (
        torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None] - places
    )  # of a key, counted in tokens
    if alibi_slopes is not None:
        scores -= torch.tensor(alibi_slopes, device=q.device)[:, None, None] * behind
    hidden = torch.zeros_like(behind, dtype=torch.bool)
    if causal:
        hidden |= behind < 0
    if sliding_window is not None:
        hidden |= behind.abs() >= sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, query_len, 1)), -1)
    weights = scores.softmax(-1)[..., :seq_len]
    return (weights.to(dtype) @ v).transpose(0, 1)
