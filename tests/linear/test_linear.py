"""Results of linear attention on every backend, against the recurrence in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiers import sampled, slow
from torch import Tensor
from torch.testing import assert_close

from fastattention.backends.torch.linear import linear_attention
from fastattention.engine import torch_ops
from fastattention.linear import chunk_gated_delta_rule, recurrent_gated_delta_rule, reference
from fastattention.linear.backend import LINEAR_BACKENDS
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.problem import LinearInputs
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase, run_rule
from linear.cases import CASES
from linear.check import check, check_gradients

BACKENDS = [name for name in LINEAR_BACKENDS.order if LINEAR_BACKENDS.get(name).why_unavailable() is None]
every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_form = pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "tokens"])


@sampled
@every_backend
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"]
)
@every_form
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_linear_attention_is_right(backend: str, case: LinearCase, chunked: bool, dtype: torch.dtype) -> None:
    problem, inputs = prepare(case.tensors(dtype), case.options(chunked))
    engine = LINEAR_BACKENDS.get(backend)
    if reason := engine.why_not(problem):
        pytest.skip(reason)
    check(problem, inputs, engine.make_call(problem, inputs)(inputs))


@sampled
@every_backend
@every_form
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_right(backend: str, case: LinearCase, chunked: bool) -> None:
    check_gradients(case, torch.float32, chunked, backend)


@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
def test_chunks_of_torch_are_the_recurrence(rule: str) -> None:
    """The comparison is in float64, without rounding errors."""
    case = LinearCase(rule=rule, seqlen=150, initial_state=True, nheads=4)
    problem, inputs = prepare(case.tensors(torch.float32), case.options(chunked=True))
    wanted = reference.linear_attention(problem, inputs)
    for chunk in (1, 16, 64, 200):
        out, state = linear_attention(problem, inputs, chunk, torch.float64)
        assert_close(out, wanted.out.float(), atol=1e-6, rtol=1e-5)
        assert wanted.final_state is not None
        assert_close(state, wanted.final_state.float(), atol=1e-6, rtol=1e-5)


def tokens_of(inputs: LinearInputs, first: int, last: int, state: Tensor | None) -> LinearInputs:
    """A part of the tokens of every sequence."""
    beta = None if inputs.beta is None else inputs.beta[:, first:last]
    return LinearInputs._make([*(x[:, first:last] for x in inputs[:4]), beta, state, None, inputs.skip])


@every_backend
@every_form
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
def test_a_state_carried_over_calls_gives_the_results_of_one(backend: str, chunked: bool, rule: str) -> None:
    inputs = LinearCase(rule=rule, batch_size=2, seqlen=150, initial_state=True).tensors(torch.float32)
    whole, last_state = run_rule(inputs, rule, chunked, backend)
    state, outs = inputs.initial_state, []
    for first, last in ((0, 1), (1, 50), (50, 50), (50, 150)):
        out, state = run_rule(tokens_of(inputs, first, last, state), rule, chunked, backend)
        outs.append(out)
    assert state is not None
    assert_close(torch.cat(outs, dim=1), whole, atol=1e-5, rtol=1e-5)
    assert_close(state, last_state, atol=1e-5, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
def test_chunks_and_tokens_agree(backend: str, rule: str) -> None:
    inputs = LinearCase(rule=rule, batch_size=2, seqlen=130, initial_state=True).tensors(torch.float32)
    for chunks, tokens in zip(
        run_rule(inputs, rule, True, backend), run_rule(inputs, rule, False, backend), strict=True
    ):
        assert_close(chunks, tokens, atol=1e-5, rtol=1e-5)


@every_backend
@every_form
def test_sequences_in_a_row_are_as_alone(backend: str, chunked: bool) -> None:
    inputs = LinearCase(seqlens=(30, 0, 71, 1), initial_state=True).tensors(torch.float32)
    assert inputs.initial_state is not None
    for dtype in (torch.int32, torch.int64):
        offsets = torch.tensor([0, 30, 30, 101, 102], dtype=dtype)
        out, states = run_rule(inputs._replace(cu_seqlens=offsets), "delta", chunked, backend)
        for i, (first, last) in enumerate(((0, 30), (30, 30), (30, 101), (101, 102))):
            alone = run_rule(tokens_of(inputs, first, last, inputs.initial_state[i : i + 1]), "delta", chunked, backend)
            assert_close(out[:, first:last], alone[0], atol=1e-6, rtol=1e-6)
            assert_close(states[i : i + 1], alone[1], atol=1e-6, rtol=1e-6)


@every_backend
@every_form
def test_values_before_keys_in_states(backend: str, chunked: bool) -> None:
    inputs = LinearCase(headdim_v=32, initial_state=True).tensors(torch.float32)
    assert inputs.initial_state is not None
    function = chunk_gated_delta_rule if chunked else recurrent_gated_delta_rule

    def call(initial_state: Tensor, state_v_first: bool) -> tuple[Tensor, Tensor | None]:
        return function(
            *inputs[:4], inputs.beta, initial_state=initial_state, output_final_state=True,
            state_v_first=state_v_first, backend=backend,
        )  # fmt: skip

    out, state = call(inputs.initial_state, False)
    out_turned, state_turned = call(inputs.initial_state.mT.contiguous(), True)
    assert state is not None
    assert state_turned is not None
    assert state_turned.is_contiguous()
    assert torch.equal(out, out_turned)
    assert torch.equal(state, state_turned.mT)


@every_backend
@every_form
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
def test_gates_of_minus_infinity_forget(backend: str, chunked: bool, rule: str) -> None:
    inputs = LinearCase(rule=rule, seqlen=100, initial_state=True).tensors(torch.float32)
    inputs.g[:, 60] = -torch.inf
    out, state = run_rule(inputs, rule, chunked, backend)
    fresh_out, fresh_state = run_rule(tokens_of(inputs, 60, 100, None), rule, chunked, backend)
    assert out.isfinite().all()
    assert_close(out[:, 60:], fresh_out, atol=1e-5, rtol=1e-5)
    assert_close(state, fresh_state, atol=1e-5, rtol=1e-5)


@every_backend
@every_form
def test_inputs_are_not_written(backend: str, chunked: bool) -> None:
    inputs = LinearCase(initial_state=True).tensors(torch.float32)
    before = [None if x is None else x.clone() for x in inputs]
    run_rule(inputs, "delta", chunked, backend)
    assert all(x is None or torch.equal(x, y) for x, y in zip(inputs, before, strict=True) if y is not None)


@every_backend
@every_form
@pytest.mark.parametrize("seqlens", [None, (), (0, 0)], ids=["dense", "no-sequence", "varlen"])
def test_without_tokens_the_state_is_a_new_tensor(backend: str, chunked: bool, seqlens: tuple[int, ...] | None) -> None:
    inputs = LinearCase(seqlen=0, seqlens=seqlens, initial_state=True).tensors(torch.float32)
    assert inputs.initial_state is not None
    as_operator = torch_ops.call(
        LINEAR_ATTENTION, inputs, LinearCase().options(chunked), backend
    )  # torch checks it, too
    for out, state in (run_rule(inputs, "delta", chunked, backend), as_operator):
        assert out.shape == inputs.v.shape
        assert state is not None
        assert torch.equal(state, inputs.initial_state)
        assert state is not inputs.initial_state
        assert state.numel() == 0 or state.data_ptr() != inputs.initial_state.data_ptr()


def test_results_without_tokens_have_gradients() -> None:
    inputs = LinearCase(seqlen=0, initial_state=True).tensors(torch.float32)
    assert inputs.initial_state is not None
    inputs.v.requires_grad_()
    inputs.initial_state.requires_grad_()
    out, state = run_rule(inputs, "delta")
    (out.sum() + state.sum()).backward()
    assert inputs.v.grad is not None
    assert torch.equal(inputs.initial_state.grad, torch.ones_like(state))


@slow
@every_backend
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
def test_64k_tokens_are_right(backend: str, rule: str) -> None:
    case = LinearCase(rule=rule, seqlen=65536, nheads=1, nheads_k=1, headdim_k=16, headdim_v=16, gates=1e-3)
    problem, inputs = prepare(case.tensors(torch.float32), case.options(chunked=True))
    out, state = LINEAR_BACKENDS.get(backend).make_call(problem, inputs)(inputs)
    assert state is not None
    # The recurrence in float64 over this many tokens, in chunks without rounding errors.
    wanted = linear_attention(replace(problem, dtype=torch.float64), inputs, 64, torch.float64)
    assert_close(out.double(), wanted.out, atol=1e-4, rtol=1e-4)
    assert wanted.final_state is not None
    assert_close(state, wanted.final_state, atol=1e-4, rtol=1e-4)
