"""What every kernel promises of every call of linear attention."""

from __future__ import annotations

import torch
from conformance.check import assert_small_errors

from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.testing.linear import expected_linear, linear_results


def check(problem: LinearProblem, inputs: LinearInputs, result: LinearOutput) -> None:
    """Errors are at most twice those of torch in the same precision, beside a few roundings."""
    assert result.out.dtype is problem.dtype
    assert (result.final_state is not None) == problem.returns_state
    assert result.final_state is None or result.final_state.dtype is torch.float32
    assert_small_errors(expected_linear(problem, inputs), linear_results(result))
