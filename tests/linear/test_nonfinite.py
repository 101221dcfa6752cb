"""A NaN or an infinity reaches what it reaches in the recurrence, token by token, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fastattention.linear import reference
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import LinearInputs, LinearOutput
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase, linear_gradients, run_rule

BACKENDS = ["cpu", "torch"]  # tests/cuda has those of GPUs
VALUES = {"nan": math.nan, "infinity": math.inf, "minus-infinity": -math.inf}

every_form = pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "tokens"])
RULES = ["delta", "head", "key", "kda", "ssd"]
every_rule = pytest.mark.parametrize("rule", RULES)


def every_tensor(*names: str) -> pytest.MarkDecorator:
    """The tensors among `names` that each rule takes."""
    given = {rule: LinearCase(rule, seqlen=1).tensors(torch.float32) for rule in RULES}
    return pytest.mark.parametrize(
        ("rule", "name"), [(rule, name) for rule in RULES for name in names if getattr(given[rule], name) is not None]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@every_form
@every_tensor("k", "v", "g", "beta")
def test_a_nan_reaches_no_earlier_token(backend: str, chunked: bool, rule: str, name: str) -> None:
    inputs = LinearCase(rule=rule, seqlen=100).tensors(torch.float32)
    tensor = getattr(inputs, name)
    wanted, _ = run_rule(inputs, rule, chunked, backend)
    tensor[:, 70:72] = torch.nan
    out, _ = run_rule(inputs, rule, chunked, backend)
    assert torch.equal(out[:, :48], wanted[:, :48])
    assert_close(out[:, :70], wanted[:, :70], atol=1e-5, rtol=1e-5)
    assert out[:, 70:].isnan().any(dim=-1).all()


def poisoned(rule: str, name: str, value: float, l2norm: bool = True) -> tuple[LinearCase, LinearInputs]:
    """A call with one element of one tensor that is not finite: of token 21, in the middle of a chunk."""
    case = LinearCase(rule, seqlen=40, nheads=4, headdim_k=8, headdim_v=6, initial_state=True, l2norm=l2norm)
    inputs = case.tensors(torch.float32)
    tensor = getattr(inputs, name)
    tensor[(0, 21, 1, 3)[: tensor.dim()]] = value
    return case, inputs


def recurrence(case: LinearCase, inputs: LinearInputs, chunked: bool) -> LinearOutput:
    problem, given = prepare(inputs, case.options(chunked))
    return reference.linear_attention(problem, given)


@pytest.mark.parametrize("backend", BACKENDS)
@every_form
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
@every_tensor("q", "k", "v", "g", "beta")
def test_results_are_finite_where_those_of_the_recurrence_are(
    backend: str, chunked: bool, rule: str, name: str, value: float
) -> None:
    case, inputs = poisoned(rule, name, value)
    wanted = recurrence(case, inputs, chunked)
    assert wanted.out.isfinite().all() == (name == "g" and value == -math.inf)  # a gate that forgets the state
    for result, right in zip(LINEAR_ATTENTION(inputs, case.options(chunked), backend), wanted, strict=True):
        assert_same_where_finite(result, right)


@every_form
@pytest.mark.parametrize("l2norm", [True, False], ids=["l2norm", "no-l2norm"])
@every_tensor("q", "k", "v", "g", "beta")
def test_gradients_of_torch_are_finite_where_those_of_the_recurrence_are(
    chunked: bool, rule: str, name: str, l2norm: bool
) -> None:
    case, inputs = poisoned(rule, name, math.nan, l2norm)
    wanted = linear_gradients(lambda given: recurrence(case, given, chunked), inputs)
    found = linear_gradients(lambda given: LINEAR_ATTENTION(given, case.options(chunked), "torch"), inputs)
    for of, right in wanted.items():
        assert_same_where_finite(found[of], right)


@every_form
@every_rule
@pytest.mark.parametrize("of_state", [False, True], ids=["out", "final-state"])
def test_a_nan_in_a_gradient_of_results_reaches_what_it_does_in_the_recurrence(
    chunked: bool, rule: str, of_state: bool
) -> None:
    case = LinearCase(rule=rule, seqlen=40, nheads=4, headdim_k=8, headdim_v=6, initial_state=True)
    inputs = case.tensors(torch.float32)
    leaves = {name: x.requires_grad_() for name, x in inputs._asdict().items() if x is not None}

    def gradients(results: LinearOutput) -> dict[str, Tensor]:
        grads = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in results if x is not None]
        grads[of_state][(0, 1, 3, 2) if of_state else (0, 21, 1, 2)] = torch.nan
        return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), grads), strict=True))

    found = gradients(LINEAR_ATTENTION(inputs, case.options(chunked), "torch"))
    for name, right in gradients(recurrence(case, inputs, chunked)).items():
        assert_same_where_finite(found[name], right)
        if not of_state and name in ("q", "k", "v", "g", "beta"):
            assert found[name][:, 22:].isfinite().all()  # of later tokens


def assert_same_where_finite(result: Tensor, right: Tensor) -> None:
    finite = right.isfinite()
    assert torch.equal(result.isfinite(), finite)
    assert_close(result[finite], right[finite].to(result.dtype), atol=1e-4, rtol=1e-4)
