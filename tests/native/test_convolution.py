"""The causal convolution of the native library, by every instruction set and any number of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from convolution.cases import CASES, UPDATES
from convolution.check import check_backward, check_forward, check_update
from tiers import sampled

from fastattention import set_num_threads
from fastattention.convolution.backend import CONVOLUTION_BACKENDS
from fastattention.convolution.validation import prepare
from fastattention.testing.convolution import DIFFERENTIATED, ConvolutionCase, weights_of_results

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@sampled
@DTYPES
@every_case
def test_results_are_right(isa: str, case: ConvolutionCase, dtype: torch.dtype) -> None:
    check_forward(CONVOLUTION_BACKENDS.get("cpu"), case, dtype)


@sampled
@DTYPES
@every_case
def test_gradients_are_right(isa: str, case: ConvolutionCase, dtype: torch.dtype) -> None:
    check_backward(CONVOLUTION_BACKENDS.get("cpu"), case, dtype)


@sampled
@DTYPES
@pytest.mark.parametrize("axes", ["", "channels", "gaps"], ids=["contiguous", "channels-last", "gaps"])
@pytest.mark.parametrize("case", UPDATES.values(), ids=UPDATES)
def test_updates_are_right(isa: str, case: ConvolutionCase, dtype: torch.dtype, axes: str) -> None:
    check_update(CONVOLUTION_BACKENDS.get("cpu"), case, dtype, axes)


@DTYPES
def test_results_do_not_depend_on_the_number_of_threads(isa: str, dtype: torch.dtype) -> None:
    case = ConvolutionCase(seqlens=(300, 0, 5, 20), channels=520)
    found = []
    for num_threads in (1, 2, 16):
        set_num_threads(num_threads)
        try:
            problem, inputs = prepare(case.tensors(dtype), case.options)
            problem, backend = replace(problem, grads=DIFFERENTIATED), CONVOLUTION_BACKENDS.get("cpu")
            output = backend.make_call(problem, inputs)(inputs)
            gradients = backend.backward(problem, inputs, output, weights_of_results(problem))
            found.append([*output, *gradients.values()])
        finally:
            set_num_threads(None)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))
