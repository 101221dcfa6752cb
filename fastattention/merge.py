"""Exact merging of attention over parts of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fastattention.errors import ArgumentError


def merge_attn_states(outs: Sequence[Tensor] | Tensor, lses: Sequence[Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Attention over all keys from attention over disjoint parts of them.

    outs: n tensors (batch_size, seqlen_q, nheads, headdim_v), or (total_q, nheads, headdim_v) when packed; all of one
        shape and dtype. A tensor is split along its first axis.
    lses: n float32 tensors (batch_size, nheads, seqlen_q), packed (nheads, total_q), as return_lse gives them.

    Returns (out, lse) in the same shapes and dtype of out:
        lse = log(sum_i exp(lse_i)),  out = sum_i exp(lse_i - lse) * out_i
    computed in float32. A part without keys (lse -inf) takes no part; rows that no part has keys for give 0 and -inf.
    Raises ArgumentError when counts or shapes do not fit.
    """
    outs, lses = list(outs), list(lses)
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"outs and lses must be of one length of at least 1, got {len(outs)} and {len(lses)}")
    for index, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != outs[0].shape or out.dtype is not outs[0].dtype:
            raise ArgumentError(
                f"outs[{index}] is {tuple(out.shape)} {out.dtype}, outs[0] is {tuple(outs[0].shape)} {outs[0].dtype}; "
                "they must be the same"
            )
        *batch, tokens, nheads, _ = out.shape
        if tuple(lse.shape) != (*batch, nheads, tokens):
            raise ArgumentError(f"lses[{index}] must be {(*batch, nheads, tokens)} to fit outs, got {tuple(lse.shape)}")
    stacked = torch.stack([lse.float() for lse in lses])
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.where(lse.isneginf(), 0.0, torch.exp(stacked - lse)).transpose(-1, -2).unsqueeze(-1)
    merged = (torch.stack([out.float() for out in outs]) * weights).sum(dim=0)
    return merged.to(outs[0].dtype), lse
