"""Linear attention under autograd, torch.compile and fake tensors."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from tiers import slow
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fastattention.linear import chunk_gated_delta_rule, chunk_gla, recurrent_gla
from fastattention.linear.problem import LinearInputs
from fastattention.linear.reference import linear_attention
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase, run_rule

RULES = pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])


def leaves(inputs: LinearInputs) -> list[Tensor]:
    return [x for x in inputs if x is not None and x.is_floating_point()]


def gradients(function: Any, inputs: LinearInputs, tensors: list[Tensor]) -> tuple[Tensor, ...]:
    out, state = function(inputs)
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum() + state.square().sum(), tensors)


@RULES
def test_gradients_are_those_of_the_recurrence(rule: str) -> None:
    results = functools.partial(run_rule, rule=rule)
    inputs = LinearCase(
        rule=rule, batch_size=2, seqlen=70, nheads=4, headdim_k=16, headdim_v=8, initial_state=True
    ).tensors(torch.float32)
    for tensor in leaves(inputs):
        tensor.requires_grad_()
    found = gradients(results, inputs, leaves(inputs))
    problem, _ = prepare(inputs, LinearCase(rule=rule).options(chunked=True))
    wanted = gradients(lambda x: linear_attention(problem, x), inputs, leaves(inputs))
    for grad, exact in zip(found, wanted, strict=True):
        assert_close(grad, exact, atol=1e-4, rtol=1e-4)


@RULES
def test_compiled_calls_and_their_gradients_are_the_same(rule: str) -> None:
    torch._dynamo.reset()  # it compiles one function for few rules only
    results = functools.partial(run_rule, rule=rule)
    inputs = LinearCase(rule=rule, seqlen=20, headdim_k=8, headdim_v=8, initial_state=True).tensors(torch.float32)
    compiled = torch.compile(results, backend="aot_eager", fullgraph=True)
    for given, wanted in zip(compiled(inputs), results(inputs), strict=True):
        assert torch.equal(given, wanted)
    for tensor in leaves(inputs):
        tensor.requires_grad_()
    found, eager = (gradients(function, inputs, leaves(inputs)) for function in (compiled, results))
    for grad, wanted_grad in zip(found, eager, strict=True):
        assert_close(grad, wanted_grad, atol=1e-6, rtol=1e-5)


@slow
@RULES
def test_the_operator_keeps_the_rules_of_torch(rule: str) -> None:
    inputs = LinearCase(rule=rule, seqlen=9, headdim_k=4, headdim_v=4, initial_state=True).tensors(torch.float32)
    for tensor in leaves(inputs):
        tensor.requires_grad_()
    options = LinearCase(rule=rule).options(chunked=True)
    torch.library.opcheck(torch.ops.fastattention.linear_attention.default, (*inputs, *options, "auto"))


def test_fake_tensors_have_the_shapes_of_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, v, g = torch.empty(2, 5, 2, 8), torch.empty(2, 5, 4, 16), torch.empty(2, 5, 4)
        out, state = recurrent_gla(q, q, v, g, output_final_state=True)
        assert state is not None
        assert (out.shape, state.shape, state.dtype) == (v.shape, (2, 4, 8, 16), torch.float32)
        assert recurrent_gla(q, q, v, g)[1] is None


def test_traced_calls_are_checked_when_they_run() -> None:
    q, v, g = torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 2, 8), torch.zeros(1, 5, 3)
    compiled = torch.compile(lambda: chunk_gla(q, q, v, g)[0], backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="g must be"):
        compiled()


@RULES
def test_autocast_does_not_round_products(rule: str) -> None:
    results = functools.partial(run_rule, rule=rule)
    inputs = LinearCase(rule=rule, seqlen=70, headdim_k=16, headdim_v=8, initial_state=True).tensors(torch.float32)
    for tensor in leaves(inputs):
        tensor.requires_grad_()
    wanted = [*results(inputs), *gradients(results, inputs, leaves(inputs))]
    with torch.autocast("cpu", torch.bfloat16):
        given = [*results(inputs), *gradients(results, inputs, leaves(inputs))]
    for result, right in zip(given, wanted, strict=True):
        assert torch.equal(result, right)


@RULES
@pytest.mark.parametrize("traced", [False, True])
def test_no_tokens_have_gradients_of_nothing(rule: str, traced: bool) -> None:
    results = functools.partial(run_rule, rule=rule)
    inputs = LinearCase(rule=rule, seqlen=0, headdim_k=16, headdim_v=8, initial_state=True).tensors(torch.float32)
    for tensor in leaves(inputs):
        tensor.requires_grad_()
    with FlopCounterMode(display=False) if traced else contextlib.nullcontext():
        out, state = results(inputs)
        (out.sum() + state.sum()).backward()
    assert [x.grad.shape for x in leaves(inputs)] == [x.shape for x in leaves(inputs)]
    assert torch.equal(inputs.initial_state.grad, torch.ones_like(state))


@RULES
def test_forward_mode_follows_a_call(rule: str) -> None:
    results = functools.partial(run_rule, rule=rule)
    inputs = LinearCase(rule=rule, seqlen=20, headdim_k=8, headdim_v=8).tensors(torch.float32)
    tangent = torch.linspace(-1, 1, inputs.v.numel()).reshape(inputs.v.shape)
    # Results are linear in v.
    wanted = results(inputs._replace(v=tangent))
    found = torch.func.jvp(lambda v: results(inputs._replace(v=v)), (inputs.v,), (tangent,))[1]
    with forward_ad.dual_level():
        dual = results(inputs._replace(v=forward_ad.make_dual(inputs.v, tangent)))
        duals = [forward_ad.unpack_dual(x).tangent for x in dual]
    for followed in (found, duals):
        for given, exact in zip(followed, wanted, strict=True):
            assert_close(given, exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("delta_rule", "products"), [(False, 2), (True, 3)], ids=["gla", "delta"])
def test_flops_are_those_of_the_recurrence(delta_rule: bool, products: int) -> None:
    """For each token and head a state of 8 x 4 elements is updated and read; the delta rule reads it twice."""
    q, v, g = torch.randn(2, 6, 3, 8), torch.randn(2, 6, 3, 4), -torch.rand(2, 6, 3)
    with FlopCounterMode(display=False) as counter:
        if delta_rule:
            chunk_gated_delta_rule(q, q, v, g, torch.rand(2, 6, 3))
        else:
            chunk_gla(q, q, v, g)
    assert counter.get_total_flops() == 2 * 6 * 3 * 2 * 8 * 4 * products
