"""The causal convolution of every backend: results, gradients, states, and what NaN reaches."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tiers import sampled
from torch import Tensor
from torch.testing import assert_close

from convolution.cases import CASES, UPDATES
from convolution.check import check_backward, check_forward, check_large_values, check_update
from fastattention.convolution import causal_conv1d, causal_conv1d_update
from fastattention.convolution.backend import CONVOLUTION_BACKENDS
from fastattention.convolution.problem import ConvolutionInputs
from fastattention.convolution.validation import prepare
from fastattention.testing.convolution import (
    DIFFERENTIATED,
    ConvolutionCase,
    expected_gradients,
    weights_of_results,
)
from fastattention.testing.oracle import FACTOR_OF_TORCH_GRADIENTS

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
every_backend = pytest.mark.parametrize("backend", ["cpu", "torch"])
SMALL = ConvolutionCase(batch_size=2, seqlen=9, channels=17)


def call(inputs: ConvolutionInputs, backend: str = "auto", **arguments: Any) -> tuple[Tensor, Tensor]:
    """(out, final state) of the public function, with SiLU."""
    x, weight, bias, state, offsets = inputs
    out, final = causal_conv1d(
        x, weight, bias, activation="silu", initial_state=state, output_final_state=True, cu_seqlens=offsets,
        backend=backend, **arguments,
    )  # fmt: skip
    assert final is not None
    return out, final


@sampled
@DTYPES
@every_backend
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_right(backend: str, case: ConvolutionCase, dtype: torch.dtype) -> None:
    check_forward(CONVOLUTION_BACKENDS.get(backend), case, dtype)


@sampled
@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_of_the_cpu_backend_are_right(case: ConvolutionCase, dtype: torch.dtype) -> None:
    check_backward(CONVOLUTION_BACKENDS.get("cpu"), case, dtype)


@sampled
@DTYPES
@every_backend
@pytest.mark.parametrize("axes", ["", "channels", "gaps"], ids=["contiguous", "channels-last", "gaps"])
@pytest.mark.parametrize("case", UPDATES.values(), ids=UPDATES)
def test_updates_are_right(backend: str, case: ConvolutionCase, dtype: torch.dtype, axes: str) -> None:
    check_update(CONVOLUTION_BACKENDS.get(backend), case, dtype, axes)


@sampled
@every_backend
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_autograd_gives_the_gradients(backend: str, case: ConvolutionCase) -> None:
    inputs = case.tensors(torch.float32)
    problem, _ = prepare(inputs, case.options)
    leaves = [x.requires_grad_() for x in inputs[:4] if x is not None]
    x, weight, bias, state, offsets = inputs
    results = causal_conv1d(
        x, weight, bias, activation="silu" if case.silu else None, initial_state=state,
        output_final_state=case.returns_state, cu_seqlens=offsets, backend=backend,
    )  # fmt: skip
    weights = weights_of_results(problem)
    pairs = [(x, w) for x, w in zip(results, weights, strict=True) if x is not None and x.requires_grad]
    found = torch.autograd.grad(
        [x for x, _ in pairs], leaves, [w for _, w in pairs], allow_unused=True, materialize_grads=True
    )
    names = [name for name in DIFFERENTIATED if getattr(inputs, name) is not None]
    wanted = expected_gradients(
        problem, ConvolutionInputs(*(None if x is None else x.detach() for x in inputs)), weights
    )  # type: ignore[arg-type]
    for name, one in wanted.errors(dict(zip(names, found, strict=True)), FACTOR_OF_TORCH_GRADIENTS).items():
        assert one.is_small, (name, one)


@every_backend
@pytest.mark.parametrize("seqlen", [1, 2, 3, 8])
def test_a_state_carried_over_calls_gives_the_results_of_one(backend: str, seqlen: int) -> None:
    """Updates, and calls that go on from a final state, give the bits of one call."""
    inputs = ConvolutionCase(batch_size=2, seqlen=24, channels=17).tensors(torch.float32)
    x, weight, bias, state, _ = inputs
    assert state is not None
    wanted, last = call(inputs, backend)
    written, carried, outs, updated = state.clone(), state, [], []
    for first in range(0, 24, seqlen):
        part = x[:, first : first + seqlen]
        out, carried = call(inputs._replace(x=part, initial_state=carried), backend)
        outs.append(out)
        updated.append(causal_conv1d_update(part, written, weight, bias, activation="swish", backend=backend))
    for found, final in ((outs, carried), (updated, written)):
        assert_close(torch.cat(found, dim=1), wanted, atol=1e-6, rtol=1e-6)
        assert torch.equal(final, last)


@every_backend
def test_sequences_in_a_row_are_as_alone(backend: str) -> None:
    inputs = ConvolutionCase(seqlens=(30, 0, 2, 71, 1), channels=17).tensors(torch.float32)
    assert inputs.cu_seqlens is not None
    assert inputs.initial_state is not None
    out, finals = call(inputs._replace(cu_seqlens=inputs.cu_seqlens.long()), backend)
    offsets = inputs.cu_seqlens.tolist()
    for i, (first, last) in enumerate(itertools.pairwise(offsets)):
        alone = inputs._replace(
            x=inputs.x[:, first:last], initial_state=inputs.initial_state[i : i + 1], cu_seqlens=None
        )
        found = call(alone, backend)
        assert_close(out[:, first:last], found[0], atol=1e-6, rtol=1e-6)
        assert torch.equal(finals[i : i + 1], found[1])


@every_backend
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_reaches_only_the_tokens_that_see_it(backend: str, value: float) -> None:
    inputs = ConvolutionCase(seqlens=(20, 20), channels=17, initial_state=False).tensors(torch.float32)
    wanted, _ = call(inputs, backend)
    inputs.x[:, 18, 3] = value
    out, _ = call(inputs, backend)
    changed = (out != wanted).nonzero().tolist()
    assert changed == [[0, 18, 3], [0, 19, 3]]  # the next sequence begins at token 20
    inputs.x[:, 18, 3] = 0.0
    inputs.x[:, 8, 5] = value
    found = call(inputs, backend)[0][:, :, 5]
    assert (~found.isfinite()).nonzero().tolist() == [[0, token] for token in range(8, 12)]


@every_backend
def test_gradients_of_nan_reach_only_the_tokens_before(backend: str) -> None:
    inputs = ConvolutionCase(seqlen=20, channels=17).tensors(torch.float32)
    x = inputs.x.requires_grad_()
    out, _ = call(inputs, backend)
    grad = torch.ones_like(out)
    grad[:, 10, 3] = torch.nan
    (found,) = torch.autograd.grad(out, x, grad)
    assert found.isnan().nonzero().tolist() == [[0, token, 3] for token in range(7, 11)]


@pytest.mark.parametrize("silu", [True, False], ids=["silu", "linear"])
def test_large_values_saturate(silu: bool) -> None:
    check_large_values(CONVOLUTION_BACKENDS.get("cpu"), silu)


@every_backend
def test_gradients_repeat_bit_for_bit(backend: str) -> None:
    case = ConvolutionCase(seqlens=(300, 3, 0, 270), channels=17)

    def gradients() -> tuple[Tensor, ...]:
        inputs = case.tensors(torch.float32)
        leaves = [x.requires_grad_() for x in inputs[:4] if x is not None]
        out, state = call(inputs, backend)
        return torch.autograd.grad(out.square().sum() + state.sum(), leaves)

    assert all(torch.equal(one, two) for one, two in zip(gradients(), gradients(), strict=True))


def test_results_are_tensors_of_their_own() -> None:
    """Without tokens the final state is a copy of the initial one."""
    for backend in ("cpu", "torch"):
        inputs = ConvolutionCase(seqlen=0, channels=1, width=2).tensors(torch.float32)
        assert inputs.initial_state is not None
        out, state = call(inputs, backend)
        assert out.shape == inputs.x.shape
        assert torch.equal(state, inputs.initial_state)
        assert state.data_ptr() != inputs.initial_state.data_ptr()
