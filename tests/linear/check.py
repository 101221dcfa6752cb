"""What every kernel promises of every call of linear attention."""

from __future__ import annotations

import torch
from conformance.check import assert_small_errors

from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.validation import prepare
from fastattention.testing.linear import (
    LinearCase,
    expected_gradients,
    expected_linear,
    linear_gradients,
    linear_results,
)
from fastattention.testing.oracle import Expected


def check(problem: LinearProblem, inputs: LinearInputs, result: LinearOutput) -> None:
    """Errors are at most twice those of torch in the same precision, beside a few roundings."""
    assert result.out.dtype is problem.dtype
    assert result.out.is_contiguous()
    assert (result.final_state is not None) == problem.returns_state
    assert result.final_state is None or result.final_state.dtype is torch.float32
    assert_small_errors(expected_linear(problem, inputs), linear_results(result))


def check_gradients(case: LinearCase, dtype: torch.dtype, chunked: bool, backend: str) -> None:
    """Errors of gradients are at most twice those of torch in the same precision, beside a few roundings."""
    given, options = case.tensors(dtype), case.options(chunked)
    found = linear_gradients(lambda inputs: LINEAR_ATTENTION(inputs, options, backend), given)
    problem, inputs = prepare(given, options)
    assert [grad.dtype for grad in found.values()] == [
        x.dtype for x in given if x is not None and x.is_floating_point()
    ]
    assert_small_errors(expected_gradients(problem, inputs), found)


def as_in_float16(wanted: Expected) -> Expected:
    """The same where operands are float16, in units of the largest gradient of results: smaller ones may be lost."""
    smallest = torch.finfo(torch.float16).smallest_normal
    return wanted._replace(floors={name: floor + smallest for name, floor in wanted.floors.items()})
