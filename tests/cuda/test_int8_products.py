"""int8 products on emulated GPUs: values that are not finite, and the parameters that calls give to kernels."""

from __future__ import annotations

import emulator
import pytest
import torch
from emulator import EmulatedCudaBackend
from torch import Tensor

from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import Options, prepare_dense
from fastattention.quantized import KEYS_OF_SCALE

BACKENDS = pytest.mark.parametrize(
    "backend", [emulator.EmulatedSm75(), emulator.EmulatedSm80()], ids=lambda backend: backend.name
)


def causal_call(seqlen: int, *, seqlen_k: int | None = None, return_lse: bool = False) -> tuple[Problem, Inputs]:
    """A call of one head, each of whose queries sees the keys up to its own."""
    generator = torch.Generator().manual_seed(0)
    lengths = seqlen, seqlen_k or seqlen, seqlen_k or seqlen
    q, k, v = (torch.randn(1, length, 1, 32, generator=generator).half() for length in lengths)
    return prepare_dense(q, k, v, options=Options(causal=True, qk_dtype="int8", return_lse=return_lse))


def nan_rows(out: Tensor) -> list[bool]:
    """Whether each row of the one head has a NaN."""
    return out[0, :, 0].isnan().any(dim=-1).tolist()


@BACKENDS
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_a_query_that_is_not_finite_spoils_its_own_row(backend: EmulatedCudaBackend, number: float) -> None:
    problem, inputs = causal_call(150)
    inputs.q[0, 77, 0, 3] = number
    assert nan_rows(backend.forward(problem, inputs).out) == [row == 77 for row in range(150)]


@BACKENDS
def test_a_query_that_is_not_finite_and_sees_no_key_gives_nothing(backend: EmulatedCudaBackend) -> None:
    problem, inputs = causal_call(40, seqlen_k=20, return_lse=True)
    inputs.q[0, 11, 0, 3] = torch.nan
    inputs.q[0, 30, 0, 3] = torch.nan
    out, lse, _ = backend.forward(problem, inputs)
    assert nan_rows(out) == [row == 30 for row in range(40)]
    assert lse is not None
    assert lse[0, 0, :20].isneginf().all()
    assert lse[0, 0].isnan().tolist() == [row == 30 for row in range(40)]


@BACKENDS
@pytest.mark.parametrize("first", [0, 1], ids=["aligned_first", "aligned_last"])
def test_values_may_be_aligned_in_one_call_and_not_in_another(backend: EmulatedCudaBackend, first: int) -> None:
    """Both calls have one signature, but a copy has other strides."""
    problem, inputs = causal_call(70)
    memory = torch.randn(1 + 70 * 100, generator=torch.Generator().manual_seed(1)).half()
    for offset in (first, 1 - first):
        v = memory[offset:].as_strided((1, 70, 1, 32), (7000, 96, 32, 1))
        expected = backend.forward(problem, inputs._replace(v=v.contiguous())).out
        assert torch.equal(backend.forward(problem, inputs._replace(v=v)).out, expected)


@BACKENDS
@pytest.mark.parametrize("number", [torch.nan, -torch.inf], ids=["nan", "inf"])
def test_a_key_that_is_not_finite_spoils_the_rows_that_see_its_group(
    backend: EmulatedCudaBackend, number: float
) -> None:
    problem, inputs = causal_call(200)
    inputs.k[0, 100, 0, 3] = number
    group = 100 // KEYS_OF_SCALE * KEYS_OF_SCALE
    assert nan_rows(backend.forward(problem, inputs).out) == [row >= group for row in range(200)]


@BACKENDS
def test_products_with_the_mean_are_computed_where_lse_shows_them(backend: EmulatedCudaBackend) -> None:
    """They are computed only then: out is the same without."""
    problem, inputs = causal_call(130)
    inputs = inputs._replace(k=inputs.k + 5.0)
    with_lse = backend.forward(*causal_call(130, return_lse=True))
    again, _ = causal_call(130, return_lse=True)
    shifted = backend.forward(again, inputs)
    assert with_lse.lse is not None
    assert shifted.lse is not None
    assert (shifted.lse - with_lse.lse).abs().max() > 1.0
    torch.testing.assert_close(shifted.out, backend.forward(problem, inputs).out, rtol=0.0, atol=0.0)


@BACKENDS
@pytest.mark.parametrize("seqlen", [3, 7, 11, 49, 99])
def test_a_mean_half_way_between_two_bfloat16_is_rounded_to_even(backend: EmulatedCudaBackend, seqlen: int) -> None:
    """The formula does the same, and sums of keys are exact."""
    problem, inputs = causal_call(seqlen, return_lse=True)
    half_way = 1.0 + 2.0**-8 + 2.0**-7 * torch.arange(32)
    # Values are multiples of 2^-9, which float16 holds up to 2.
    deviations = (64.0 * inputs.k[0, : seqlen // 2, 0].float()).round().clamp(-200.0, 200.0) * 2.0**-9
    pairs = torch.cat((half_way + deviations, half_way - deviations, half_way.expand(1, 32)))
    k = pairs.half()[None, :, None]
    assert torch.equal(k.double().mean(dim=1)[0, 0], half_way.double())
    inputs = inputs._replace(k=k, q=inputs.q * 4)
    expected = reference_attention(problem, inputs)
    result = backend.forward(problem, inputs)
    assert result.lse is not None
    assert expected.lse is not None
    torch.testing.assert_close(result.lse.double(), expected.lse, rtol=1e-3, atol=1e-3)
