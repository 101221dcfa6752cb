"""What the causal convolution must return: cases, their tensors, results and gradients in float64, errors of torch."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from fastattention.convolution.problem import (
    ConvolutionGradients,
    ConvolutionInputs,
    ConvolutionOutput,
    ConvolutionProblem,
)
from fastattention.convolution.reference import causal_convolution
from fastattention.convolution.validation import ConvolutionOptions
from fastattention.engine.offsets import spans
from fastattention.testing.memory import guarded
from fastattention.testing.oracle import Expected, Results, error_of, largest

DIFFERENTIATED = ("x", "weight", "bias", "initial_state")


@dataclass(frozen=True)
class ConvolutionCase:
    """One call. seqlens: of the sequences of a varlen call; otherwise there are `batch_size` of `seqlen` tokens."""

    batch_size: int = 1
    seqlen: int = 67
    seqlens: tuple[int, ...] | None = None
    channels: int = 100
    width: int = 4
    has_bias: bool = True
    silu: bool = True
    initial_state: bool = True
    returns_state: bool = True
    state_len: int | None = None  # of an update
    state_dtype: torch.dtype | None = None  # of an update; None: that of x
    weight_dtype: torch.dtype | None = None  # None: that of x, as that of bias, which otherwise is float32
    layout: str = "contiguous"  # or "channels": x is a view of (batch_size, channels, seqlen); or "gaps" between rows

    @cached_property
    def sampled_by(self) -> Mapping[str, Hashable]:
        """Axis -> value: what tests of this list are sampled by, in place of names. See tiers.py."""
        return {
            "varlen": self.seqlens,
            "seqlen": self.seqlen,
            "channels": self.channels,
            "width": self.width,
            "parts": (self.has_bias, self.silu),
            "state": (self.initial_state, self.returns_state, self.state_len, str(self.state_dtype)),
            "parameters": str(self.weight_dtype),
            "memory": self.layout,
        }

    @property
    def options(self) -> ConvolutionOptions:
        """The scalars of the call."""
        return ConvolutionOptions(self.silu, self.returns_state)

    def tensors(self, dtype: torch.dtype) -> ConvolutionInputs:
        """Random tensors in host memory, with NaN around each of them."""
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(repr(self).encode()))

        def normal(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

        batch_size, seqlen = (1, sum(self.seqlens)) if self.seqlens is not None else (self.batch_size, self.seqlen)
        sequences = batch_size if self.seqlens is None else len(self.seqlens)
        state_len = self.width - 1 if self.state_len is None else self.state_len
        bias_dtype = dtype if self.weight_dtype is None else torch.float32
        x = normal(dtype, batch_size, seqlen, self.channels)
        if self.layout == "channels":
            x = guarded(x.transpose(1, 2).contiguous()).transpose(1, 2)
        elif self.layout == "gaps":
            x = guarded(torch.cat([x, x.new_full((*x.shape[:2], 3), math.nan)], dim=2))[..., : self.channels]
        else:
            x = guarded(x)
        offsets = None
        if self.seqlens is not None:
            offsets = torch.tensor([0, *self.seqlens], dtype=torch.int64, device="cpu").cumsum(0).to(torch.int32)
        state = normal(self.state_dtype or dtype, sequences, self.channels, state_len)
        return ConvolutionInputs(
            x,
            guarded(normal(self.weight_dtype or dtype, self.channels, self.width)),
            guarded(normal(bias_dtype, self.channels)) if self.has_bias else None,
            guarded(state) if self.initial_state else None,
            offsets,
        )


def convolution_results(output: ConvolutionOutput) -> Results:
    """The results of a call by name."""
    return {name: one for name, one in output._asdict().items() if one is not None}


def expected_convolution(problem: ConvolutionProblem, inputs: ConvolutionInputs) -> Expected:
    """What the call must return. For an update that is out, and the new state as final_state."""
    exact, usual = (convolution_results(one(problem, inputs)) for one in (causal_convolution, same_precision))
    return _expected(exact, usual, dict.fromkeys(exact, problem.dtype))


def weights_of_results(problem: ConvolutionProblem) -> ConvolutionGradients:
    """Random gradients of the results of a call, from which tests begin a backward."""
    generator = torch.Generator("cpu").manual_seed(1)
    shapes = problem.out_shape, problem.state_shape
    out, state = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in shapes)
    return ConvolutionGradients(out.to(problem.dtype), state.to(problem.dtype) if problem.returns_state else None)


def expected_gradients(problem: ConvolutionProblem, inputs: ConvolutionInputs, grads: ConvolutionGradients) -> Expected:
    """The gradients of all tensors, by their names, for these gradients of the results."""
    exact = _gradients(causal_convolution, torch.float64, problem, inputs, grads)
    usual = _gradients(same_precision, torch.float32, problem, inputs, grads)
    dtypes = {name: getattr(inputs, name).dtype for name in exact}
    usual = {name: one.to(dtypes[name]) for name, one in usual.items()}
    return _expected(exact, usual, dtypes)


def _expected(exact: Results, usual: Results, dtypes: Mapping[str, torch.dtype]) -> Expected:
    """Sums of a few tokens are exact in torch by chance: two roundings of the largest value are always allowed."""
    errors = {name: error_of(name, usual[name], right) for name, right in exact.items()}
    floors = {name: 2 * torch.finfo(dtypes[name]).eps * largest(right) for name, right in exact.items()}
    return Expected(exact, errors, floors)


def _gradients(
    function: Callable[..., ConvolutionOutput],
    dtype: torch.dtype,
    problem: ConvolutionProblem,
    inputs: ConvolutionInputs,
    grads: ConvolutionGradients,
) -> Results:
    given = inputs._asdict()
    leaves = {
        name: given[name].to(dtype).detach().requires_grad_() for name in DIFFERENTIATED if given[name] is not None
    }
    output = function(problem, inputs._replace(**leaves), dtype)
    pairs = [(x, grad) for x, grad in zip(output, grads, strict=True) if x is not None and grad is not None]
    loss = sum((x.to(dtype) * grad.to(dtype)).sum() for x, grad in pairs if x.requires_grad)
    if not isinstance(loss, Tensor):
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def same_precision(
    problem: ConvolutionProblem, inputs: ConvolutionInputs, dtype: torch.dtype | None = None
) -> ConvolutionOutput:
    """The convolution of torch in float32, rounded to the dtype of the call unless `dtype` is given."""
    x, weight = inputs.x.float(), inputs.weight.float().unsqueeze(1)
    bias = None if inputs.bias is None else inputs.bias.float()
    zeros = torch.zeros(problem.state_shape, dtype=torch.float32, device=problem.device)
    states = zeros if inputs.initial_state is None else inputs.initial_state.float()
    outs, finals = [], []
    for state, (batch, first, last) in zip(
        states, spans(problem.batch_size, problem.seqlen, inputs.cu_seqlens), strict=True
    ):
        row = torch.cat([state, x[batch, first:last].T], dim=1)  # (channels, state_len + tokens)
        finals.append(row[:, row.shape[1] - problem.state_len :])
        if last > first:
            used = row[:, problem.state_len - (problem.width - 1) :]
            outs.append(functional.conv1d(used.unsqueeze(0), weight, bias, groups=problem.channels)[0].T)
    out = torch.cat(outs).view(problem.out_shape) if outs else x * weight[:, 0, 0]
    out = functional.silu(out) if problem.silu else out
    final = torch.stack(finals) if finals else states
    out, final = (out.to(dtype), final.to(dtype)) if dtype else (out.to(problem.dtype), final.to(problem.state_dtype))
    return ConvolutionOutput(out, final if problem.returns_state or problem.updates else None)
