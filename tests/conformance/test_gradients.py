"""Gradients of our backwards have at most twice the error of torch's implementation in the same precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tiers import sampled
from torch import Tensor

from conformance.calls import Call, build_call, call_without_numbers, problem_of
from conformance.case import Case, DenseCase, VarlenCase
from conformance.cases import CASES, LONG
from conformance.engines import ENGINES, Engine
from conformance.oracle import largest, largest_error, out_floor
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.reference import reference_attention
from fastattention.backends.common.gradients import COMPUTED

Attention = Callable[[Call], tuple[Tensor, Tensor]]

FACTOR, FACTOR_BY_TORCH = 2.0, 3.0
DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "attn_bias", "sinks")
OURS = [engine for engine in ENGINES if ATTENTION_BACKENDS.get(engine.backend).has_backward]
every_backward = pytest.mark.parametrize("engine", OURS, ids=[engine.name for engine in OURS])
Names = Sequence[str]


def has_gradients(case: Case) -> bool:
    """Whether gradients of a case are tested: not if it takes long, or if lse is -3e38, too large for keys to add."""
    if not isinstance(case, (DenseCase, VarlenCase)) or case.batch_size == 0 or case in LONG or case.qk_dtype:
        return False
    return not (case.bias is not None and case.bias.finite and case.bias.hides == "rows")


GRADIENT_CASES = [case for case in CASES if has_gradients(case)]


def gradients(case: Case, dtype: torch.dtype, attention: Attention, wanted: Names) -> list[Tensor]:
    """Gradients of a weighted sum of out and lse by the arguments called `wanted`, in that order."""
    call = build_call(case, dtype)
    given = [call.arguments[name] for name in wanted]
    for tensor in given:
        tensor.requires_grad_()
    out, lse = attention(call)
    generator = torch.Generator().manual_seed(1)
    finite = lse.double().masked_fill(lse.isneginf(), 0.0)
    out_weights, lse_weights = (torch.randn(result.shape, generator=generator) for result in (out, lse))
    loss = (out.double() * out_weights.to(dtype).double()).sum() + (finite * lse_weights.double()).sum()
    return list(torch.autograd.grad(loss, given))


@functools.cache
def names(case: Case, among: Names) -> Names:
    """The arguments of a case's call among `among`."""
    call = call_without_numbers(case, torch.float32)
    return tuple(name for name in among if call.arguments[name] is not None)


@functools.lru_cache(maxsize=16)  # the engines of one case and dtype are tested one after the other
def through_reference(case: Case, dtype: torch.dtype, wanted: Names, compute_dtype: torch.dtype | None) -> list[Tensor]:
    def attention(call: Call) -> tuple[Tensor, Tensor]:
        out, lse, _ = reference_attention(*call.prepare(), compute_dtype)
        assert lse is not None
        return out, lse

    return gradients(case, dtype, attention, wanted)


def check(case: Case, dtype: torch.dtype, wanted: Names, actual: Sequence[Tensor], factor: float) -> None:
    """Every element finite, and its error at most `factor` times the largest of torch's."""
    exact = through_reference(case, dtype, wanted, torch.float64)
    usual = through_reference(case, dtype, wanted, None)
    floor = out_floor(case, dtype)
    for name, right, by_torch, ours in zip(wanted, exact, usual, actual, strict=True):
        assert ours.isfinite().all()
        right = right.double()
        allowed = factor * largest_error(by_torch, right) + floor * max(1.0, largest(right))
        error = largest_error(ours, right)
        assert error <= allowed, f"the gradient of {name} is off by {error:.3g}; allowed are {allowed:.3g}"


@sampled
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=[case.name for case in GRADIENT_CASES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_backward
def test_error_of_our_gradients_is_at_most_twice_that_of_torch(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    wanted = names(case, COMPUTED)
    reason = engine.refusal(replace(problem_of(case, dtype), grads=wanted))
    if reason is not None:
        pytest.skip(reason)
    with engine.active():
        actual = gradients(case, dtype, lambda call: call.run(engine.backend), wanted)
    check(case, dtype, wanted, actual, FACTOR)


@every_backward
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ("sinks",)], ids=" ".join)
def test_what_needs_no_gradient_changes_none(wanted: Names, dtype: torch.dtype, engine: Engine) -> None:
    case = next(case for case in GRADIENT_CASES if case.name == "varlen-sinks")
    with engine.active():
        alone = gradients(case, dtype, lambda call: call.run(engine.backend), wanted)
        all_of_them = gradients(case, dtype, lambda call: call.run(engine.backend), COMPUTED)
    for name, got in zip(wanted, alone, strict=True):
        assert torch.equal(got, all_of_them[COMPUTED.index(name)])


@sampled
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=[case.name for case in GRADIENT_CASES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_error_of_gradients_is_at_most_three_times_that_of_torch(dtype: torch.dtype, case: Case) -> None:
    """Uses backend="auto", which takes the first backend with gradients."""
    wanted = names(case, DIFFERENTIABLE)
    check(case, dtype, wanted, gradients(case, dtype, lambda call: call.run("auto"), wanted), FACTOR_BY_TORCH)
