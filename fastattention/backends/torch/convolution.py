"""The torch backend of the causal convolution: operations of torch, which autograd follows, on any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.backends.common.convolution import why_not_gradients
from fastattention.convolution.backend import ConvolutionBackend, Serve
from fastattention.convolution.problem import ConvolutionInputs, ConvolutionOutput, ConvolutionProblem
from fastattention.engine.offsets import spans


class TorchConvolutionBackend(ConvolutionBackend):
    """Computes in float32 and rounds once."""

    name = "torch"

    def why_unavailable(self) -> str | None:
        """Never: torch is always there."""
        return None

    def why_not(self, problem: ConvolutionProblem) -> str | None:
        """Serves everything but gradients of an update."""
        return why_not_gradients(problem)

    def make_call(self, problem: ConvolutionProblem, inputs: ConvolutionInputs) -> Serve:
        """The computation itself; nothing is prepared."""
        if problem.updates:
            return lambda inputs: _update(problem, inputs)
        return lambda inputs: convolution(problem, inputs)


def convolution(
    problem: ConvolutionProblem, inputs: ConvolutionInputs, dtype: torch.dtype = torch.float32
) -> ConvolutionOutput:
    """(out, states after the last token of each sequence), computed in `dtype`."""
    x = inputs.x.to(dtype)
    if inputs.initial_state is None:
        states = torch.zeros(problem.state_shape, dtype=dtype, device=problem.device)
    else:
        states = inputs.initial_state.to(dtype)
    if not problem.varlen:
        rows = torch.cat([states.transpose(1, 2), x], dim=1)  # (batch_size, state_len + seqlen, channels)
        outs, finals = [_filtered(problem, inputs, rows)], [_newest(problem, rows)]
    else:
        outs, finals = [], []
        for state, (_, first, last) in zip(states, spans(1, problem.seqlen, inputs.cu_seqlens), strict=True):
            rows = torch.cat([state.mT.unsqueeze(0), x[:, first:last]], dim=1)
            outs.append(_filtered(problem, inputs, rows))
            finals.append(_newest(problem, rows))
        # Results without a sequence are made of all tensors, so that each has a gradient, which is empty or zero.
        padding = x.new_zeros(1, problem.state_len, problem.channels)
        outs = outs or [_filtered(problem, inputs, torch.cat([padding, x], dim=1))]
        finals = finals or [states.clone()]
    final = torch.cat(finals).to(problem.state_dtype) if problem.returns_state or problem.updates else None
    return ConvolutionOutput(torch.cat(outs, dim=1).to(problem.dtype), final)


def _filtered(problem: ConvolutionProblem, inputs: ConvolutionInputs, rows: Tensor) -> Tensor:
    """Filters all rows but the first state_len, which come before the first token."""
    weight, before = inputs.weight.to(rows.dtype), problem.state_len - (problem.width - 1)
    seqlen = rows.shape[1] - problem.state_len
    parts = [weight[:, w] * rows[:, before + w : before + w + seqlen] for w in range(problem.width)]
    out = sum(parts[1:], start=parts[0])
    out = out if inputs.bias is None else out + inputs.bias.to(rows.dtype)
    return functional.silu(out) if problem.silu else out


def _newest(problem: ConvolutionProblem, rows: Tensor) -> Tensor:
    """The last state_len rows as a state: (batch_size, channels, state_len)."""
    return rows[:, rows.shape[1] - problem.state_len :].transpose(1, 2).contiguous()


def _update(problem: ConvolutionProblem, inputs: ConvolutionInputs) -> ConvolutionOutput:
    out, final = convolution(problem, inputs)
    assert inputs.initial_state is not None
    assert final is not None
    inputs.initial_state.copy_(final)
    return ConvolutionOutput(out)
