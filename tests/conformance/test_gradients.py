"""Gradients of our backwards have at most twice the error of torch's implementation in the same precision."""

from __future__ import annotations

import pytest
import torch
from tiers import sampled

from conformance.check import assert_small_errors
from conformance.engines import Engine
from conformance.gradients import GRADIENT_CASES, check_gradients, every_backward
from fastattention.backends.common.gradients import COMPUTED
from fastattention.testing.calls import build_call
from fastattention.testing.case import Case
from fastattention.testing.oracle import FACTOR_OF_TORCH_GRADIENTS, expected, present, results_of

DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "attn_bias", "sinks")
every_case = pytest.mark.parametrize("case", GRADIENT_CASES, ids=[case.name for case in GRADIENT_CASES])


@sampled
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_backward
def test_error_of_our_gradients_is_at_most_twice_that_of_torch(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    check_gradients(engine, case, dtype)


@every_backward
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grads", [("q",), ("k",), ("v",), ("q", "v"), ("sinks",)], ids=" ".join)
def test_what_needs_no_gradient_changes_none(grads: tuple[str, ...], dtype: torch.dtype, engine: Engine) -> None:
    case = next(case for case in GRADIENT_CASES if case.name == "varlen-sinks")
    with engine.active():
        alone = results_of(build_call(case, dtype), engine.run, grads)
        all_of_them = results_of(build_call(case, dtype), engine.run, COMPUTED)
    for name, found in alone.items():
        assert torch.equal(found, all_of_them[name])


@sampled
@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_error_of_gradients_is_at_most_three_times_that_of_torch(dtype: torch.dtype, case: Case) -> None:
    """With backend="auto": the first backend that has them."""
    grads = present(case, DIFFERENTIABLE)
    found = results_of(build_call(case, dtype), lambda call: call.run("auto"), grads)
    assert_small_errors(expected(case, dtype, grads), found, FACTOR_OF_TORCH_GRADIENTS)
