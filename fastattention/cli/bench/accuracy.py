"""The error of a result against exact attention in float64, on sampled rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.cli.bench.workload import BenchWorkload, Tensors, make_gradient, sequences

# Sampled rows of each sequence: evenly spread, with the first and the last. All heads are compared.
SAMPLED_ROWS = 16


def max_error(workload: BenchWorkload, tensors: Tensors, out: Tensor) -> float:
    """Largest absolute difference between `out` and float64 attention over the sampled rows.

    out: (batch_size, seqlen_q, nheads, headdim), or varlen (total_q, nheads, headdim); for a backward, the gradient of
        q.
    """
    outs = torch.split(out, list(workload.seqlens_q)) if workload.kind == "packed" else out.unbind()
    grads = make_gradient(workload).unbind() if workload.kind == "backward" else [None] * workload.batch_size
    batch = zip(sequences(workload, tensors), outs, grads, strict=True)
    return max(_sequence_error(workload, sequence, result, grad) for sequence, result, grad in batch)


def _sequence_error(workload: BenchWorkload, sequence: Tensors, out: Tensor, grad: Tensor | None) -> float:
    q, k, v = sequence
    seqlen_q, seqlen_k, group = len(q), len(k), workload.nheads // workload.nheads_k
    rows = torch.linspace(0, seqlen_q - 1, min(SAMPLED_ROWS, seqlen_q), dtype=torch.float32, device="cpu").long()
    bias = torch.zeros(len(rows), seqlen_k, dtype=torch.float32, device="cpu")
    if workload.causal:
        hidden = torch.arange(seqlen_k, device="cpu") > rows[:, None] + seqlen_k - seqlen_q
        bias.masked_fill_(hidden, float("-inf"))
    worst = 0.0
    for head in range(workload.nheads_k):
        # The query heads of a group become rows of one head: keys are converted to float64 once, a head at a time.
        heads = slice(head * group, (head + 1) * group)
        queries = q[rows, heads].reshape(1, -1, 1, workload.headdim).requires_grad_(grad is not None)
        problem, inputs = prepare_dense(
            queries,
            k[None, :, head : head + 1],
            v[None, :, head : head + 1],
            Options(softmax_scale=workload.headdim**-0.5),
            attn_bias=bias.repeat_interleave(group, dim=0),
        )
        expected = reference_attention(problem, inputs).out.reshape(len(rows), group, -1)
        if grad is not None:  # a row of the gradient depends on that row alone
            expected = torch.autograd.grad(expected, queries, grad[rows, heads].double())[0].view_as(expected)
        worst = max(worst, float((out[rows, heads].double() - expected).abs().max()))
    return worst
