"""Memory for the results of a call, and what they are where rows see no keys."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.problem import AttentionOutput, Inputs, Layout, Problem


def keyless(
    problem: Problem, inputs: Inputs, headdim_v: int | None = None, dtype: torch.dtype | None = None
) -> AttentionOutput:
    """Results of rows without keys: out 0, and lse -inf or the sink, which is then all that a row attends to.

    headdim_v, dtype: of out, where a kernel writes others than those of the problem
    """
    lse: Tensor | None = None
    if problem.return_lse:
        lse = inputs.q.new_full(problem.lse_shape, -torch.inf, dtype=torch.float32)
        if inputs.sinks is not None:
            lse.copy_(inputs.sinks.unsqueeze(-1))
    shape = (*problem.out_shape[:-1], headdim_v or problem.headdim_v)
    return AttentionOutput(inputs.q.new_zeros(shape, dtype=dtype or problem.dtype), lse)


def unwritten(
    problem: Problem, inputs: Inputs, headdim_v: int | None = None, dtype: torch.dtype | None = None
) -> AttentionOutput:
    """Memory for results that kernels write; the numbers in it are arbitrary.

    Only rows of varlen calls that lie behind the last sequence, which no tile has, are those of rows without keys.
    """
    if problem.layout is Layout.VARLEN:
        return keyless(problem, inputs, headdim_v, dtype)
    out = inputs.q.new_empty((*problem.out_shape[:-1], headdim_v or problem.headdim_v), dtype=dtype or problem.dtype)
    lse = inputs.q.new_empty(problem.lse_shape, dtype=torch.float32) if problem.return_lse else None
    return AttentionOutput(out, lse)
