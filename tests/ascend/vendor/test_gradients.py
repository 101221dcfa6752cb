"""Gradients by the vendor's operator: their values, as it is documented, and the calls that are made for them."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ascend.vendor.cases import parametrize
from ascend.vendor.engine import ENGINE
from ascend.vendor.environment import skip_without_torch_npu
from ascend.vendor.gradient_cases import ODD, check_gradients, gradient_runs, prepared, training_results, weights_of
from ascend.vendor.recorder import Recorded, Recorder, on_meta, shapes
from fastattention import explain, fast_attn_func, fast_attn_varlen_func
from fastattention.attention.problem import OutputGradients
from fastattention.backends.ascend import vendor
from fastattention.backends.ascend.vendor.operators import GRADIENT, TRAINING, OperatorCall
from fastattention.backends.ascend.vendor.operators import check as check_call
from fastattention.backends.common.gradients import COMPUTED
from fastattention.testing.calls import Call, build_call
from fastattention.testing.case import Case, DenseCase, VarlenCase

skip_without_torch_npu()

RUNS = list(gradient_runs(torch.float16, torch.bfloat16, torch.float32))
SINKS = next(case for case in ODD if case.name == "gradients-sinks")


def by_the_vendor(call: Call) -> Tensor:
    with ENGINE.active():
        return call.run_without_lse(ENGINE.backend)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "dtype" in metafunc.fixturenames:
        parametrize(metafunc, RUNS)


def test_error_is_at_most_twice_that_of_torch(case: Case, dtype: torch.dtype) -> None:
    check_gradients(case, dtype, by_the_vendor)


def test_every_case_of_ours_is_served() -> None:
    assert [case.name for case in ODD if (case, torch.bfloat16) not in RUNS] == []


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("q", "v"), ("sinks",)], ids=" ".join)
def test_what_needs_no_gradient_changes_none(wanted: tuple[str, ...]) -> None:
    alone, together = (training_results(SINKS, torch.bfloat16, by_the_vendor, grads) for grads in (wanted, COMPUTED))
    for name, found in alone.items():
        assert torch.equal(found, together[name])


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_rows_without_keys_have_gradient_zero(sinks: bool) -> None:
    q, k, v = tensors((2, 10, 4, 16), (2, 5, 2, 16), (2, 5, 2, 16))
    options: dict[str, Any] = {"sinks": torch.ones(4)} if sinks else {}
    with ENGINE.active():
        out = fast_attn_func(q, k, v, causal=True, backend=ENGINE.backend, **options)
    (grad_q,) = torch.autograd.grad(out.sum(), q)
    assert not grad_q[:, :5].any()
    assert grad_q[:, 6:].any(dim=-1).all()  # row 5 has one key, whose weight is 1


def test_sequences_without_queries_or_keys_have_gradient_zero() -> None:
    q, k, v = tensors((6, 2, 16), (9, 2, 16), (9, 2, 16))
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 4, 6], [0, 3, 9, 9]))
    with ENGINE.active():
        out = fast_attn_varlen_func(q, k, v, offsets_q, offsets_k, backend=ENGINE.backend)
    grad_q, grad_k, grad_v = torch.autograd.grad(out, (q, k, v), weights_of(out.shape, out.dtype))
    assert grad_q[:4].any()
    assert not grad_q[4:].any()  # their sequence has no keys
    for grad in (grad_k, grad_v):
        assert not grad[:3].any()  # no queries
        assert grad[3:].any(dim=-1).all()


def test_nothing_to_attend_to_calls_nothing() -> None:
    sinks = torch.ones(4, requires_grad=True)
    for seqlen_q, seqlen_k in ((0, 5), (5, 0)):
        q, k, v = tensors((2, seqlen_q, 4, 16), (2, seqlen_k, 2, 16), (2, seqlen_k, 2, 16))
        with ENGINE.active(), Recorder() as recorder:
            out = fast_attn_func(q, k, v, sinks=sinks, backend=ENGINE.backend)
            found = torch.autograd.grad(out.sum(), (q, k, v, sinks))
        assert recorder.calls == []
        assert [grad.shape for grad in found] == [q.shape, k.shape, v.shape, sinks.shape]
        assert not any(grad.any() for grad in found)


def test_compiled_calls_have_the_same_gradients() -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = fast_attn_func(q, k, v, causal=True, backend=ENGINE.backend)
        return out

    sources = tensors((2, 33, 4, 16), (2, 40, 2, 16), (2, 40, 2, 16))
    with ENGINE.active():
        found = []
        for function in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
            out = function(*sources)
            found.append(torch.autograd.grad(out, sources, weights_of(out.shape, out.dtype)))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_explain_says_who_computes_the_gradients() -> None:
    q, k, v = tensors((1, 5, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16))
    with ENGINE.active():
        printed = str(explain(q, k, v))
        forward_only = str(explain(q.detach(), k.detach(), v.detach()))
    assert "vendor: could serve this call by operators of torch_npu, forward and backward" in printed
    assert "vendor: could serve this call by operators of torch_npu\n" in forward_only + "\n"


@functools.cache
def calls() -> dict[str, list[Recorded]]:
    """The calls of operators that each case makes."""
    made = {}
    for case, dtype in gradient_runs(torch.float16):
        problem, inputs = prepared(case, dtype)
        with Recorder() as recorder:
            result = vendor.forward(problem, inputs)
            grad_out = weights_of(result.out.shape, dtype)
            vendor.backward(problem, inputs, result, OutputGradients(grad_out, None))
        if recorder.calls:
            made[case.name] = recorder.calls
    return made


def test_a_call_is_one_operator_and_its_gradient_another() -> None:
    for name, made in calls().items():
        assert [call.name for call in made] == [TRAINING, GRADIENT], name


def test_every_mapping_is_among_the_cases() -> None:
    made = {(*backward.mapping[:3], backward.arguments.get("sink") is not None) for _, backward in calls().values()}
    expected = {
        (GRADIENT, layout, mode, sinks) for layout in ("BSND", "TND") for mode in (0, 3, 4) for sinks in (False, True)
    } - {(GRADIENT, "BSND", 4, True)}  # covered with TND
    assert sorted(expected - made) == []


def test_every_argument_is_in_the_real_schema() -> None:
    for name, (_, backward) in calls().items():
        arguments = {argument.name: argument for argument in backward.operator._schema.arguments}
        assert set(backward.arguments) <= set(arguments), name
        required = {given for given, argument in arguments.items() if not argument.has_default_value()}
        assert required <= set(backward.arguments), name


def test_the_real_shape_inference_agrees() -> None:
    for name, (_, backward) in calls().items():
        inferred = backward.operator(**{key: on_meta(value) for key, value in backward.arguments.items()})
        assert shapes(inferred) == shapes(backward.results), name


def explicit(call: Recorded) -> dict[str, Any]:
    """The arguments that differ from the defaults of the schema."""
    defaults = {argument.name: argument.default_value for argument in call.operator._schema.arguments}
    given = call.arguments.items()
    return {name: value for name, value in given if isinstance(value, Tensor) or value != defaults[name]}


def test_the_gradient_is_given_the_mask_and_the_lengths_of_the_forward() -> None:
    renamed = {"scale": "scale_value"}
    of_the_gradient = {"dy", "attention_in", "softmax_max", "softmax_sum"}
    for name, (forward, backward) in calls().items():
        shared = {renamed.get(key, key): value for key, value in explicit(forward).items()}
        assert set(explicit(backward)) - set(shared) == of_the_gradient, name
        for key, value in shared.items():
            got = backward.arguments[key]
            same = torch.equal(got, value) if isinstance(value, Tensor) else got == value
            assert same, f"{key} of {name}"


def test_the_statistics_say_what_those_of_the_forward_say() -> None:
    """Weights are exp(score - maximum) / sum, so only maximum + log(sum) counts."""
    for name, (forward, backward) in calls().items():
        of_forward, of_backward = (
            row_max.double() + row_sum.double().log()
            for row_max, row_sum in (
                forward.results[1:3],
                (backward.arguments["softmax_max"], backward.arguments["softmax_sum"]),
            )
        )
        torch.testing.assert_close(of_backward, of_forward, rtol=1e-6, atol=1e-6, msg=name)
        assert torch.equal(backward.arguments["attention_in"], forward.results[0]), name


def gradient_call(**changed: Any) -> OperatorCall:
    q, k = torch.zeros(1, 3, 4, 16), torch.zeros(1, 3, 2, 16)
    row_max = torch.zeros(1, 4, 3, 8)
    arguments = {"query": q, "key": k, "value": k, "dy": q, "attention_in": q, "head_num": 4, "input_layout": "BSND",
                 "softmax_max": row_max, "softmax_sum": torch.ones_like(row_max)}  # fmt: skip
    return OperatorCall(GRADIENT, arguments | changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sparse_mode": 3}, "needs atten_mask"),
        ({"key": torch.zeros(1, 3, 3, 16)}, "4 query heads cannot share 3"),
        ({"dy": torch.zeros(1, 3, 2, 16)}, "dy must be"),
        ({"dy": torch.zeros(1, 3, 4, 32)[..., ::2]}, "dy must be contiguous"),
        ({"attention_in": torch.zeros(1, 3, 4, 16).half()}, "attention_in must be"),
        ({"softmax_max": torch.zeros(1, 3, 4, 8)}, "softmax_max must be"),
        ({"softmax_sum": torch.zeros(1, 4, 3, 1)}, "softmax_sum must be"),
        ({"softmax_sum": torch.zeros(1, 4, 3, 1).expand(1, 4, 3, 8)}, "softmax_sum must be contiguous"),
    ],
    ids=["no-mask", "heads", "dy", "dy-strides", "out-dtype", "tokens-first", "one-of-eight", "expanded"],
)
def test_what_the_vendor_would_take_is_refused_here(changed: dict[str, Any], named: str) -> None:
    check_call(gradient_call())
    call = gradient_call(**changed)
    torch.ops.npu.npu_fusion_attention_grad(**{name: on_meta(value) for name, value in call.arguments.items()})
    with pytest.raises(ValueError, match=named):
        check_call(call)


@pytest.mark.parametrize("case", ODD, ids=[case.name for case in ODD])
def test_backward_writes_none_of_its_inputs(case: Case) -> None:
    assert isinstance(case, (DenseCase, VarlenCase))
    problem, inputs = prepared(case, torch.float16)
    result = vendor.forward(problem, inputs)
    grads = OutputGradients(weights_of(result.out.shape, result.out.dtype), None)
    read = [each for each in (*inputs, *result, *grads) if isinstance(each, Tensor)]
    before = [each.clone() for each in read]
    found = vendor.backward(problem, inputs, result, grads)
    assert all(torch.equal(one, other) for one, other in zip(read, before, strict=True))
    for name, grad in found.items():
        tensor = getattr(inputs, name)
        assert (grad.shape, grad.dtype, grad.is_contiguous()) == (tensor.shape, tensor.dtype, True)


def test_no_lse_is_computed_for_calls_without_gradients() -> None:
    problem, inputs = build_call(ODD[0], torch.float16).prepare()
    assert vendor.forward(replace(problem, return_lse=False), inputs).lse is None
