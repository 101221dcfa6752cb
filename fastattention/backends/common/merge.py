"""Merges attention over disjoint parts of the keys, in plain torch: differentiable, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_parts(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(out, lse) of all parts: the formula of `fastattention.merge_attn_states`, whose arguments they are."""
    stacked = torch.stack(list(lses))
    stacked = stacked.masked_fill(stacked.isposinf(), -torch.inf)
    peak = stacked.detach().amax(dim=0)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = torch.exp(stacked - peak)
    total = weights.sum(dim=0)
    dead = total == 0.0
    total = total.masked_fill(dead, 1.0)
    merged = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, lse, weight in zip(outs, stacked, weights / total, strict=True):
        merged = merged + _per_row(weight) * out.float().masked_fill(_per_row(lse.isneginf()), 0.0)
    return merged.to(outs[0].dtype), (peak + total.log()).masked_fill(dead, -torch.inf)


def _per_row(x: Tensor) -> Tensor:
    """(..., nheads, tokens), the order of lse, to (..., tokens, nheads, 1), which broadcasts against out."""
    return x.transpose(-1, -2).unsqueeze(-1)
