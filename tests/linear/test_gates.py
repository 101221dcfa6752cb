"""The gate functions of Kimi delta attention, against their formulas in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattention.linear import chunk_kda, recurrent_kda
from fastattention.testing.linear import LinearCase

CASE = LinearCase(rule="kda", batch_size=2, seqlen=40, nheads=4, headdim_k=16, headdim_v=8)


def formula(g: Tensor, a_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The logarithm of the gate in float64, element by element."""
    x = g.double() if dt_bias is None else g.double() + dt_bias.double().reshape(4, 16)
    rate = torch.ones(4, 1).double() if a_log is None else a_log.double().exp().reshape(4, 1)
    if lower_bound is None:
        return -rate * (1.0 + x.exp()).log()
    return lower_bound / (1.0 + (-rate * x).exp())


@pytest.mark.parametrize("function", [chunk_kda, recurrent_kda])
@pytest.mark.parametrize(
    ("given", "lower_bound"),
    [("bound-only", -5.0), *itertools.product(["rate", "rate-and-bias", "flat-bias"], [None, -5.0])],
)
def test_gates_before_their_function_are_those_after_it(function: Any, lower_bound: float | None, given: str) -> None:
    inputs = CASE.tensors(torch.float32)
    generator = torch.Generator().manual_seed(1)
    g, bias = (torch.randn(shape, generator=generator) for shape in (inputs.g.shape, (4, 16)))
    a_log = torch.randn(4, generator=generator) if given != "bound-only" else None
    dt_bias = {"rate-and-bias": bias, "flat-bias": bias.flatten()}.get(given)
    arguments: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    found = function(
        *inputs[:3], g, inputs.beta, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias, lower_bound=lower_bound,
        **arguments,
    )  # fmt: skip
    wanted = function(*inputs[:3], formula(g, a_log, dt_bias, lower_bound).float(), inputs.beta, **arguments)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_parameters_of_gates_have_gradients() -> None:
    inputs = CASE.tensors(torch.float32)
    parameters = [torch.zeros(4), torch.full((64,), 0.1)]
    for tensor in parameters:
        tensor.requires_grad_()
    a_log, dt_bias = parameters
    out, _ = chunk_kda(*inputs[:4], inputs.beta, use_gate_in_kernel=True, A_log=a_log, dt_bias=dt_bias)  # type: ignore[arg-type]
    grads = torch.autograd.grad(out.square().sum(), parameters)
    step = 1e-2
    for tensor, grad in zip(parameters, grads, strict=True):
        change = torch.zeros_like(tensor)
        change[0] = step
        sums = []
        for sign in (-1, 1):
            moved = [x.detach() + sign * change if x is tensor else x.detach() for x in parameters]
            result, _ = chunk_kda(
                *inputs[:4],
                inputs.beta,
                use_gate_in_kernel=True,
                A_log=moved[0],
                dt_bias=moved[1],  # type: ignore[arg-type]
            )
            sums.append(float(result.double().square().sum()))
        assert float(grad[0]) == pytest.approx((sums[1] - sums[0]) / (2 * step), rel=2e-2, abs=1e-4)
