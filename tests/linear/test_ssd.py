"""Mamba-2's arguments: its formula in float64, and refusals by the names of the arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattention import ArgumentError
from fastattention.linear import chunk_ssd, recurrent_ssd

BATCH, SEQLEN, NHEADS, HEADDIM, NGROUPS, DSTATE = 2, 70, 4, 12, 2, 20
BOTH = pytest.mark.parametrize("function", [chunk_ssd, recurrent_ssd])


def arguments() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    b, c = (normal(BATCH, SEQLEN, NGROUPS, DSTATE) / DSTATE**0.5 for _ in range(2))
    return {
        "x": normal(BATCH, SEQLEN, NHEADS, HEADDIM), "dt": normal(BATCH, SEQLEN, NHEADS), "A": -normal(NHEADS).exp(),
        "B": b, "C": c, "D": normal(NHEADS), "dt_bias": normal(NHEADS),
        "initial_state": normal(BATCH, NHEADS, HEADDIM, DSTATE),
    }  # fmt: skip


def formula(given: dict[str, Tensor], softplus: bool, limit: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The recurrence in float64, head by head."""
    given = {name: tensor.double() for name, tensor in given.items()}
    outs, states = [], []
    for batch, head in torch.cartesian_prod(torch.arange(BATCH), torch.arange(NHEADS)).tolist():
        group, state = head // (NHEADS // NGROUPS), given["initial_state"][batch, head]
        for token in range(SEQLEN):
            dt = given["dt"][batch, token, head] + given["dt_bias"][head]
            dt = ((1 + dt.exp()).log() if softplus else dt).clamp(*limit)
            x = given["x"][batch, token, head]
            state = (dt * given["A"][head]).exp() * state + torch.outer(x, dt * given["B"][batch, token, group])
            outs.append(state @ given["C"][batch, token, group] + given["D"][head] * x)
        states.append(state)
    out = torch.stack(outs).reshape(BATCH, NHEADS, SEQLEN, HEADDIM).transpose(1, 2)
    return out, torch.stack(states).reshape(BATCH, NHEADS, HEADDIM, DSTATE)


@BOTH
@pytest.mark.parametrize(
    ("softplus", "limit"), [(True, (0.0, math.inf)), (False, (0.0, math.inf)), (True, (0.3, 0.9))],
    ids=["softplus", "positive", "limited"],
)  # fmt: skip
def test_results_are_those_of_the_formula(function: Any, softplus: bool, limit: tuple[float, float]) -> None:
    given = arguments()
    out, state = function(**given, dt_softplus=softplus, dt_limit=limit, output_final_state=True)
    wanted, last = formula(given, softplus, limit)
    assert_close(out, wanted.float(), atol=1e-4, rtol=1e-4)
    assert_close(state, last.float(), atol=1e-4, rtol=1e-4)


@BOTH
def test_states_may_have_dstate_first(function: Any) -> None:
    given = arguments()
    out, state = function(**given, dt_softplus=True, output_final_state=True)
    turned = given | {"initial_state": given["initial_state"].mT}
    out_turned, state_turned = function(**turned, dt_softplus=True, output_final_state=True, state_v_first=False)
    assert torch.equal(out, out_turned)
    assert torch.equal(state, state_turned.mT)


def test_every_tensor_has_a_gradient() -> None:
    given = {name: tensor.requires_grad_() for name, tensor in arguments().items()}
    out, _ = chunk_ssd(**given, dt_softplus=True)
    wanted, _ = formula(given, True, (0.0, math.inf))
    grads, exact = (torch.autograd.grad(one.square().sum(), list(given.values())) for one in (out, wanted))
    for name, grad, right in zip(given, grads, exact, strict=True):
        assert_close(grad, right.float(), atol=2e-3, rtol=2e-3, msg=lambda text, name=name: f"{name}: {text}")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x-no-tensor": ({"x": None}, r"x must be a torch.Tensor, got NoneType"),
    "x-dtype": ({"x": torch.zeros(2, 70, 4, 12).double()}, r"x has dtype torch.float64; allowed are"),
    "x-rank": ({"x": torch.zeros(2, 70, 4)}, r"x must be \(batch_size, seqlen, nheads, headdim\), got shape"),
    "headdim": ({"x": torch.zeros(2, 70, 4, 257)}, r"headdim=257 is not supported; allowed are 1 to 256"),
    "dt-shape": ({"dt": torch.zeros(2, 70)}, r"dt must be \(batch_size, seqlen, nheads\) = \(2, 70, 4\)"),
    "dt-dtype": ({"dt": torch.zeros(2, 70, 4).long()}, r"dt must be float32, float16 or bfloat16, got torch.int64"),
    "A-shape": ({"A": torch.zeros(3)}, r"A must be \(nheads,\) = \(4,\), got shape \(3,\)"),
    "D-device": ({"D": torch.zeros(4, device="meta")}, r"D is on meta and x on cpu"),
    "B-tokens": (
        {"B": torch.zeros(2, 9, 2, 20), "C": torch.zeros(2, 9, 2, 20)},
        r"B must have the batch_size and seqlen of x, \(2, 70\)",
    ),
    "B-groups": (
        {"B": torch.zeros(2, 70, 3, 20), "C": torch.zeros(2, 70, 3, 20)},
        r"nheads=4 of x must be a positive multiple of ngroups=3 of B",
    ),
    "C-shape": ({"C": torch.zeros(2, 70, 2, 8)}, r"C must be .* = \(2, 70, 2, 20\), got shape \(2, 70, 2, 8\)"),
    "C-dtype": ({"C": torch.zeros(2, 70, 2, 20).half()}, r"C has dtype torch.float16 and x has torch.float32"),
    "limit": ({"dt_limit": 3.0}, r"dt_limit must be two numbers, the least and the most, got 3.0"),
    "limit-order": ({"dt_limit": (2.0, 1.0)}, r"dt_limit=\(2.0, 1.0\) must have its least number first"),
    "softplus": ({"dt_softplus": 2}, r"dt_softplus must be True or False, got 2"),
    "state": (
        {"initial_state": torch.zeros(2, 4, 20, 12)},
        r"initial_state must be .*, headdim_v, headdim_k\) = \(2, 4, 12, 20\)",
    ),
    "layout": ({"dt": torch.zeros(2, 70, 4).to_sparse()}, r"dt has layout torch.sparse_coo"),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_an_error_names_the_argument(function: Any, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ArgumentError, match=message):
        function(**arguments() | changes)


@BOTH
def test_arguments_of_mamba_ssm_say_what_to_give(function: Any) -> None:
    with pytest.raises(TypeError, match="seq_idx'; give cu_seqlens"):
        function(**arguments(), seq_idx=None)
