"""Attention in plain torch: softcap, sinks, lse and dropout by a seed, which torch's own function cannot express."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Problem
from fastattention.backends.common import dropout
from fastattention.backends.sdpa.chunked import compute_chunked
from fastattention.backends.sdpa.masks import Chunk, chunk_mask, chunks
from fastattention.backends.sdpa.parts import Part, fold_groups, unfold_groups


def attend(problem: Problem, part: Part, seed: Tensor | None) -> AttentionOutput:
    """Attention of one part, computed in float32 and rounded once.

    seed: the seed of dropout; None without dropout
    Returns out (batch_size, nheads, seqlen_q, headdim_v), lse (batch_size, nheads, seqlen_q) and the dropout mask
    (batch_size, nheads, seqlen_q, seqlen_k); the latter two only when asked for.
    """
    part = part._replace(q=part.q.float(), k=part.k.float(), v=part.v.float())
    scores_per_row = part.q.shape[0] * problem.nheads * part.k.shape[2]
    cut = list(chunks(problem, part, scores_per_row))
    results = compute_chunked(lambda chunk: _attend_chunk(problem, part, chunk, seed), cut, problem.needs_grad)
    masks = [mask for _, _, mask in results if mask is not None]
    return AttentionOutput(
        torch.cat([out for out, _, _ in results], dim=2).to(problem.dtype),
        torch.cat([lse for _, lse, _ in results], dim=2) if problem.return_lse else None,
        torch.cat(masks, dim=2) if masks else None,
    )


def _attend_chunk(
    problem: Problem, part: Part, chunk: Chunk, seed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(out, lse, dropout mask) of a chunk's rows."""
    weights, lse = _softmax(_scores(problem, part, chunk), part.sinks)
    mask = None
    if seed is not None:
        sequences = slice(part.first, part.first + part.q.shape[0])
        kept = dropout.kept(seed, problem.dropout_p, sequences, problem.nheads, chunk.rows, chunk.keys)
        if problem.return_mask:
            signed = torch.where(kept, weights, -weights).detach().to(problem.dtype)
            mask = F.pad(signed, (chunk.keys.start, part.k.shape[2] - chunk.keys.stop))
        weights = weights * kept / (1.0 - problem.dropout_p)
    out = fold_groups(weights, problem.nheads_k) @ part.v[:, :, chunk.keys]
    return unfold_groups(out, problem.group_size), lse, mask


def _scores(problem: Problem, part: Part, chunk: Chunk) -> Tensor:
    """Masked scores of a chunk: (batch_size, nheads, rows, keys)."""
    q = fold_groups(part.q[:, :, chunk.rows] * problem.softmax_scale, problem.nheads_k)
    scores = unfold_groups(q @ part.k[:, :, chunk.keys].transpose(2, 3), problem.group_size)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    visible, added = chunk_mask(problem, part, chunk)
    if added is not None:
        scores = scores + added
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(weights, lse) over the last axis. A row without keys has weights 0 and lse -inf, or its sink."""
    peak = F.pad(scores.detach(), (0, 1), value=-torch.inf).amax(dim=-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.detach().view(-1, 1, 1))
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    exponentials = torch.exp(scores - peak)
    total = exponentials.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(-1, 1, 1) - peak)
    dead = total == 0.0
    total = total.masked_fill(dead, 1.0)
    lse = (peak + total.log()).masked_fill(dead, -torch.inf)
    return exponentials / total, lse.squeeze(-1)
