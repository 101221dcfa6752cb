"""What every kernel promises of every call of the causal convolution."""

from __future__ import annotations

from dataclasses import replace

import torch
from conformance.check import assert_small_errors
from torch import Tensor
from torch.testing import assert_close

from fastattention.convolution.backend import ConvolutionBackend
from fastattention.convolution.problem import ConvolutionGradients, ConvolutionInputs
from fastattention.convolution.validation import ConvolutionOptions, prepare, prepare_update
from fastattention.testing.convolution import (
    DIFFERENTIATED,
    ConvolutionCase,
    convolution_results,
    expected_convolution,
    expected_gradients,
    weights_of_results,
)
from fastattention.testing.memory import guarded


def check_forward(backend: ConvolutionBackend, case: ConvolutionCase, dtype: torch.dtype) -> None:
    """Errors are at most twice those of torch, beside a few roundings; no tensor of the call is written."""
    problem, inputs = prepare(case.tensors(dtype), case.options)
    before = [None if x is None else x.clone() for x in inputs]
    result = backend.make_call(problem, inputs)(inputs)
    assert result.out.dtype is dtype
    assert result.out.is_contiguous()
    assert (result.final_state is not None) == problem.returns_state
    assert result.final_state is None or result.final_state.dtype is dtype
    assert_small_errors(expected_convolution(problem, inputs), convolution_results(result))
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, before, strict=True) if y is not None)


def check_backward(backend: ConvolutionBackend, case: ConvolutionCase, dtype: torch.dtype) -> None:
    """Gradients of all tensors, from gradients of both results, of out alone, and of the state alone."""
    problem, inputs = prepare(case.tensors(dtype), case.options)
    names = tuple(name for name in DIFFERENTIATED if getattr(inputs, name) is not None)
    problem = replace(problem, grads=names)
    output = backend.make_call(problem, inputs)(inputs)
    both = weights_of_results(problem)
    for grads in (
        [both] if both.final_state is None else [both, both._replace(out=None), both._replace(final_state=None)]
    ):
        given = grads._replace(**{name: guarded(x) for name, x in grads._asdict().items() if x is not None})
        found = backend.backward(problem, inputs, output, given)
        assert tuple(found) == names
        for name, grad in found.items():
            assert grad.is_contiguous()
            assert grad.dtype is getattr(inputs, name).dtype
        assert_small_errors(expected_gradients(problem, inputs, grads), found)


def check_update(backend: ConvolutionBackend, case: ConvolutionCase, dtype: torch.dtype, axes: str = "") -> None:
    """out and the new state are right, for a state in the order of axes that `axes` names; nothing else is written."""
    given = case.tensors(dtype)
    given = given._replace(initial_state=strided(given.initial_state, axes))
    problem, inputs = prepare_update(given, case.options)
    wanted = expected_convolution(problem, inputs)
    exact_state = wanted.exact["final_state"]
    x = inputs.x.clone()
    result = backend.make_call(problem, inputs)(inputs)
    assert result.final_state is None
    assert_small_errors(wanted, {"out": result.out})
    assert inputs.initial_state is not None
    assert torch.equal(inputs.initial_state.double(), exact_state)
    memory = inputs.initial_state._base  # NaN but for the state
    assert memory is not None
    assert int(memory.isfinite().sum()) == inputs.initial_state.numel()
    assert torch.equal(inputs.x, x)


def check_large_values(backend: ConvolutionBackend, silu: bool) -> None:
    """SiLU of large values is 0 or the value, and its derivative 0 or 1."""
    x = torch.tensor([-3e38, -1e30, -500.0, -100.0, 100.0, 3e38]).view(1, 6, 1)
    problem, inputs = prepare(ConvolutionInputs(x, torch.tensor([[0.0, 1.0]])), ConvolutionOptions(silu))
    output = backend.make_call(problem, inputs)(inputs)
    grads = ConvolutionGradients(torch.ones_like(x), None)
    found = backend.backward(replace(problem, grads=("x",)), inputs, output, grads)
    assert_close(output.out, x.clamp(min=0.0) if silu else x, atol=1e-6, rtol=1e-6)
    assert_close(found["x"], (x > 0).float() if silu else torch.ones_like(x), atol=1e-6, rtol=0.0)


def strided(state: Tensor | None, axes: str) -> Tensor | None:
    """A copy of a state: contiguous, "channels" last, or with "gaps" of NaN between all elements."""
    if state is None or not axes:
        return state
    if axes == "channels":
        return guarded(state.transpose(1, 2).contiguous()).transpose(1, 2)
    memory = torch.full([2 * size + 1 for size in state.shape], torch.nan, dtype=state.dtype)
    return memory[1::2, 1::2, 1::2].copy_(state)
