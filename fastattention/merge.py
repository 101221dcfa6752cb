"""Exact merging of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattention.errors import ArgumentError
from fastattention.validation.common import signature


def merge_attn_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint parts of them.

    outs: n tensors (batch_size, seqlen_q, nheads, headdim_v), or (total_q, nheads, headdim_v) when packed; all of one
        shape and dtype. A tensor is split along its first axis.
    lses: n float32 tensors (batch_size, nheads, seqlen_q), packed (nheads, total_q), as return_lse gives them.

    Returns (out, lse) in the same shapes and dtype of out:
        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) * out_i
    computed in float32. A part without keys (lse -inf) takes no part; rows that no part has keys for give 0 and -inf.
    Differentiable. Raises ArgumentError when counts, shapes or dtypes do not fit.
    """
    outs, lses = list(outs), list(lses)
    _check_parts(outs, lses)
    stacked = torch.stack(lses)
    peak = stacked.detach().amax(dim=0)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = torch.exp(stacked - peak)
    total = weights.sum(dim=0)
    dead = total == 0.0
    total = total.masked_fill(dead, 1.0)
    merged = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, lse, weight in zip(outs, lses, weights / total, strict=True):
        merged = merged + _per_row(weight) * out.float().masked_fill(_per_row(lse.isneginf()), 0.0)
    return merged.to(outs[0].dtype), (peak + total.log()).masked_fill(dead, -torch.inf)


def _per_row(x: Tensor) -> Tensor:
    """(..., nheads, tokens), the order of lse, to (..., tokens, nheads, 1), which broadcasts against out."""
    return x.transpose(-1, -2).unsqueeze(-1)


def _check_parts(outs: list[Tensor], lses: list[Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs and lses must be of one length of at least 1, got {len(outs)} and {len(lses)}")
    first = signature("outs[0]", outs[0])
    if len(first.shape) not in (3, 4):
        raise ArgumentError(
            "outs[0] must be (batch_size, seqlen_q, nheads, headdim_v) or (total_q, nheads, headdim_v), "
            f"got shape {tuple(first.shape)}"
        )
    *batch, tokens, nheads, _ = first.shape
    lse_shape = (*batch, nheads, tokens)
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if signature(f"outs[{index}]", out) != first:
            raise ArgumentError(f"outs[{index}] is {signature('', out)}; it must be like outs[0], {first}")
        given = signature(f"lses[{index}]", lse)
        if given != (lse_shape, torch.float32, first.device):
            raise ArgumentError(
                f"lses[{index}] must be {lse_shape} float32 on {first.device} to fit outs[{index}], got {given}"
            )
