"""Gradients: error at most three times that of differentiating the same-precision torch implementation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiers import thin
from torch import Tensor

from conformance.calls import Call, build_call
from conformance.case import Case, DenseCase, VarlenCase
from conformance.cases import CASES, LONG
from conformance.oracle import largest, largest_error, out_floor
from fastattention.reference import reference_attention

FACTOR = 3.0
DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "attn_bias", "sinks")


def has_gradients(case: Case) -> bool:
    """Cases that take long are left out, and a row whose lse is -3e38: what its keys add to that is below rounding."""
    if not isinstance(case, (DenseCase, VarlenCase)) or case.batch_size == 0 or case in LONG:
        return False
    return not (case.bias is not None and case.bias.finite and case.bias.hides == "rows")


GRADIENT_CASES = [case for case in CASES if has_gradients(case)]


def gradients(case: Case, dtype: torch.dtype, attention: Callable[[Call], tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gradients of a weighted sum of out and lse by every differentiable argument, in the order of `names`."""
    call = build_call(case, dtype)
    given = [call.arguments[name] for name in names(call)]
    for tensor in given:
        tensor.requires_grad_()
    out, lse = attention(call)
    generator = torch.Generator().manual_seed(1)
    finite = lse.double().masked_fill(lse.isneginf(), 0.0)
    out_weights, lse_weights = (torch.randn(result.shape, generator=generator) for result in (out, lse))
    loss = (out.double() * out_weights.to(dtype).double()).sum() + (finite * lse_weights.double()).sum()
    return list(torch.autograd.grad(loss, given))


def names(call: Call) -> list[str]:
    return [name for name in DIFFERENTIABLE if call.arguments[name] is not None]


def through_reference(call: Call, compute_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    out, lse, _ = reference_attention(*call.prepare(), compute_dtype)
    assert lse is not None
    return out, lse


@thin(quick=11, all=3)
@pytest.mark.parametrize("case", GRADIENT_CASES, ids=[case.name for case in GRADIENT_CASES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_error_of_gradients_is_at_most_three_times_that_of_torch(dtype: torch.dtype, case: Case) -> None:
    """With backend="auto": the first backend that has a backward."""
    exact = gradients(case, dtype, lambda call: through_reference(call, torch.float64))
    usual = gradients(case, dtype, lambda call: through_reference(call, None))
    actual = gradients(case, dtype, lambda call: call.run("auto"))
    floor = out_floor(case, dtype)
    for name, wanted, by_torch, ours in zip(names(build_call(case, dtype)), exact, usual, actual, strict=True):
        assert ours.isfinite().all()
        wanted = wanted.double()
        allowed = FACTOR * largest_error(by_torch, wanted) + floor * max(1.0, largest(wanted))
        error = largest_error(ours, wanted)
        assert error <= allowed, f"the gradient of {name} is off by {error:.3g}; allowed are {allowed:.3g}"
