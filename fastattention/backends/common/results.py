"""Results of rows without keys."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Problem


def keyless(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """Results of rows without keys: out is 0, and lse -inf or the sink, which is all that such a row attends to."""
    lse: Tensor | None = None
    if problem.return_lse:
        lse = inputs.q.new_full(problem.lse_shape, -torch.inf, dtype=torch.float32)
        if inputs.sinks is not None:
            lse.copy_(inputs.sinks.unsqueeze(-1))
    return AttentionOutput(inputs.q.new_zeros(problem.out_shape, dtype=problem.dtype), lse)
