"""The exact causal convolution, token by token, written to be read. Every backend is tested against it.

Each channel has a filter of `width` weights, whose last one multiplies the token itself:

    out[t] = act(bias + sum_w weight[w] x[t - width + 1 + w])

Tokens before a sequence come from its state: the newest inputs before it, newest last. act is SiLU or nothing.
"""

from __future__ import annotations

import torch

from fastattention.convolution.problem import ConvolutionInputs, ConvolutionOutput, ConvolutionProblem
from fastattention.engine.offsets import spans


def causal_convolution(
    problem: ConvolutionProblem, inputs: ConvolutionInputs, dtype: torch.dtype = torch.float64
) -> ConvolutionOutput:
    """(out, states after the last token of each sequence), computed in `dtype`. Writes nothing.

    The states are new ones, also in an update.
    """
    x, weight = inputs.x.to(dtype), inputs.weight.to(dtype)
    bias = torch.zeros(problem.channels, dtype=dtype, device=problem.device)
    if inputs.bias is not None:
        bias = inputs.bias.to(dtype)
    if inputs.initial_state is None:
        states = torch.zeros(problem.state_shape, dtype=dtype, device=problem.device)
    else:
        states = inputs.initial_state.to(dtype)
    out = torch.zeros(problem.out_shape, dtype=dtype, device=problem.device)
    final_states = []
    sequences = spans(problem.batch_size, problem.seqlen, inputs.cu_seqlens)
    for state, (batch, first, last) in zip(states, sequences, strict=True):
        for token in range(first, last):
            inputs_so_far = torch.cat([state, x[batch, token].unsqueeze(1)], dim=1)  # (channels, state_len + 1)
            state = inputs_so_far[:, 1:]
            value = bias + (weight * inputs_so_far[:, -problem.width :]).sum(dim=1)
            out[batch, token] = value * value.sigmoid() if problem.silu else value
        final_states.append(state)
    states = torch.stack(final_states) if final_states else states
    return ConvolutionOutput(out, states if problem.returns_state or problem.updates else None)
