"""The causal convolution under torch.compile, fake tensors, vmap, transforms, autocast and checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance.mapped import check_mapped
from tiers import slow
from torch import Tensor, func
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fastattention import UnsupportedError
from fastattention.convolution import causal_conv1d, causal_conv1d_update
from fastattention.convolution.operators import CONVOLUTION
from fastattention.convolution.problem import ConvolutionInputs
from fastattention.testing.convolution import ConvolutionCase

CASES = {
    "dense": ConvolutionCase(batch_size=2, seqlen=9, channels=6),
    "varlen": ConvolutionCase(seqlens=(5, 0, 4), channels=6, width=3),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def results(inputs: ConvolutionInputs, backend: str = "auto") -> tuple[Tensor, Tensor]:
    x, weight, bias, state, offsets = inputs
    out, final = causal_conv1d(
        x, weight, bias, activation="silu", initial_state=state, output_final_state=True, cu_seqlens=offsets,
        backend=backend,
    )  # fmt: skip
    assert final is not None
    return out, final


def with_leaves(case: ConvolutionCase, dtype: torch.dtype = torch.float32) -> tuple[ConvolutionInputs, list[Tensor]]:
    inputs = case.tensors(dtype)
    return inputs, [x.requires_grad_() for x in inputs[:4] if x is not None]


def gradients(function: Any, inputs: ConvolutionInputs, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    out, state = function(inputs)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return torch.autograd.grad((out * weights).sum() + state.square().sum(), leaves)


@every_case
def test_compiled_calls_and_their_gradients_are_the_same(case: ConvolutionCase) -> None:
    inputs, leaves = with_leaves(case)
    compiled = torch.compile(results, backend="aot_eager", fullgraph=True)
    for given, wanted in zip(compiled(inputs), results(inputs), strict=True):
        assert torch.equal(given, wanted)
    found, eager = (gradients(function, inputs, leaves) for function in (compiled, results))
    assert all(torch.equal(one, two) for one, two in zip(found, eager, strict=True))


def test_a_compiled_update_writes_the_state() -> None:
    inputs = CASES["dense"].tensors(torch.float32)
    assert inputs.initial_state is not None
    state, traced = inputs.initial_state.clone(), inputs.initial_state.clone()

    def step(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out = causal_conv1d_update(x, state, inputs.weight, inputs.bias, activation="silu")
        return out, state * 2

    wanted = step(inputs.x, state)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(inputs.x, traced)
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    assert torch.equal(traced, state)


@slow
@every_case
def test_the_operator_keeps_the_rules_of_torch(case: ConvolutionCase) -> None:
    inputs, _ = with_leaves(case)
    operator = torch.ops.fastattention.causal_conv1d.default
    torch.library.opcheck(operator, (*inputs, *case.options, "auto"))
    torch.library.opcheck(operator, (*(None if x is None else x.detach() for x in inputs), False, False, "torch"))


@slow
def test_the_update_keeps_the_rules_of_torch() -> None:
    x, weight, bias, state, _ = CASES["dense"].tensors(torch.float32)
    operator = torch.ops.fastattention.causal_conv1d_update.default
    for backend in ("auto", "torch"):
        torch.library.opcheck(operator, (x, state, weight, bias, True, backend))


def test_fake_tensors_have_the_shapes_of_results() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(2, 5, 8, dtype=torch.float16), torch.empty(8, 3)
        out, state = causal_conv1d(x, weight, output_final_state=True)
        assert state is not None
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        assert (state.shape, state.dtype) == ((2, 8, 2), x.dtype)
        assert causal_conv1d(x, weight)[1] is None
        assert causal_conv1d_update(x, torch.empty(2, 8, 4), weight).shape == x.shape


@every_case
def test_vmap_of_any_tensor_is_one_call(case: ConvolutionCase) -> None:
    given = {name: x for name, x in case.tensors(torch.float32)._asdict().items() if x is not None}
    other_offsets = torch.tensor([[0, 5, 5, 9], [0, 0, 1, 9]], dtype=torch.int32)
    alone = [{name} for name in given]
    for names in (*alone, {"x", "initial_state"}, {"weight", "bias"}, given.keys() - {"cu_seqlens"}):
        mapped = {name: torch.stack([x, -x.flip(0)]) for name, x in given.items() if name in names}
        if "cu_seqlens" in mapped:
            mapped["cu_seqlens"] = other_offsets
        check_mapped(CONVOLUTION, lambda **tensors: results(ConvolutionInputs(**tensors)), given, mapped)


def test_vmap_of_filters_and_offsets_is_a_call_for_each_index() -> None:
    given = CASES["varlen"].tensors(torch.float32)._asdict()
    mapped = {"weight": torch.stack([given["weight"]] * 2), "cu_seqlens": torch.stack([given["cu_seqlens"]] * 2)}
    check_mapped(CONVOLUTION, lambda **tensors: results(ConvolutionInputs(**tensors)), given, mapped, calls=2)


def test_vmap_of_another_axis_and_without_states() -> None:
    inputs = CASES["dense"].tensors(torch.float32)

    def call(x: Tensor) -> Tensor:
        return causal_conv1d(x, inputs.weight)[0]

    x = torch.stack([inputs.x, 2 * inputs.x], dim=2)
    found = torch.vmap(call, in_dims=2, out_dims=1)(x)
    assert torch.equal(found, torch.stack([call(inputs.x), call(2 * inputs.x)], dim=1))


def test_vmap_of_an_update_writes_every_state() -> None:
    x, weight, bias, state, _ = CASES["dense"].tensors(torch.float32)
    assert state is not None
    states = torch.stack([state, 2 * state])
    out = torch.vmap(lambda s: causal_conv1d_update(x, s, weight, bias))(states)
    for index, initial in enumerate((state, 2 * state)):
        alone = initial.clone()
        assert torch.equal(out[index], causal_conv1d_update(x, alone, weight, bias))
        assert torch.equal(states[index], alone)
    with pytest.raises(UnsupportedError, match="vmap does not map state"):
        torch.vmap(lambda x: causal_conv1d_update(x, state, weight, bias))(torch.stack([x, x]))


@every_case
def test_autocast_changes_nothing(case: ConvolutionCase) -> None:
    for backend in ("cpu", "torch"):
        inputs, leaves = with_leaves(case)
        function = lambda inputs, backend=backend: results(inputs, backend)  # noqa: E731
        wanted = [*function(inputs), *gradients(function, inputs, leaves)]
        with torch.autocast("cpu", torch.bfloat16):
            given = [*function(inputs), *gradients(function, inputs, leaves)]
        assert all(torch.equal(one, two) for one, two in zip(given, wanted, strict=True))


def test_checkpointing_gives_the_same_gradients() -> None:
    inputs, leaves = with_leaves(CASES["dense"])

    def again(inputs: ConvolutionInputs) -> tuple[Tensor, Tensor]:
        found = checkpoint(lambda *tensors: results(ConvolutionInputs(*tensors)), *inputs, use_reentrant=False)
        return found[0], found[1]

    found, wanted = (gradients(function, inputs, leaves) for function in (again, results))
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_transforms_and_second_derivatives_follow_the_torch_backend() -> None:
    inputs = CASES["dense"].tensors(torch.float32)

    def loss(x: Tensor) -> Tensor:
        out, state = results(inputs._replace(x=x))
        return out.square().sum() + state.sum()

    x = inputs.x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(x), x)
    assert_close(func.grad(loss)(inputs.x), wanted, atol=1e-5, rtol=1e-5)
    tangent = torch.linspace(-1, 1, inputs.x.numel()).reshape(inputs.x.shape)
    assert_close(func.jvp(loss, (inputs.x,), (tangent,))[1], (wanted * tangent).sum(), atol=1e-4, rtol=1e-4)
    with pytest.raises(UnsupportedError, match="follows operations of torch alone; use backend='torch'"):
        func.grad(lambda x: results(inputs._replace(x=x), "cpu")[0].sum())(inputs.x)
    found, wanted = (
        second_derivatives(function, inputs.x.to(dtype), inputs.weight.to(dtype))
        for function, dtype in ((ours, torch.float32), (plain, torch.float64))
    )
    for one, exact in zip(found, wanted, strict=True):
        assert_close(one.double(), exact, atol=1e-4, rtol=1e-4)


def ours(x: Tensor, weight: Tensor) -> Tensor:
    return causal_conv1d(x, weight, activation="silu", backend="torch")[0]


def plain(x: Tensor, weight: Tensor) -> Tensor:
    rows = functional.pad(x.mT, (weight.shape[1] - 1, 0))
    return functional.silu(functional.conv1d(rows, weight.unsqueeze(1), groups=weight.shape[0])).mT


def second_derivatives(function: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.detach().requires_grad_() for tensor in (x, weight)]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    return torch.autograd.grad(sum(grad.square().sum() for grad in first), leaves)


def test_a_state_that_a_graph_needs_is_not_overwritten_in_silence() -> None:
    x, weight, bias, state, _ = CASES["dense"].tensors(torch.float32)
    assert state is not None
    for backend in ("cpu", "torch"):
        factor = torch.ones_like(state).requires_grad_()
        product = factor * state
        causal_conv1d_update(x, state, weight, bias, backend=backend)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_flops_are_those_of_the_filters() -> None:
    inputs, leaves = with_leaves(CASES["dense"])
    with FlopCounterMode(display=False) as counter:
        out, _ = results(inputs)
        assert counter.get_total_flops() == 2 * 2 * 9 * 6 * 4
        torch.autograd.grad(out.sum(), leaves)
    assert counter.get_total_flops() == 3 * 2 * 2 * 9 * 6 * 4
