"""Linear attention of the native library, by every instruction set and any number of threads."""

from __future__ import annotations

import pytest
import torch
from linear.cases import CASES
from linear.check import check, check_gradients
from tiers import sampled

from fastattention import set_num_threads
from fastattention.linear.backend import LINEAR_BACKENDS
from fastattention.linear.operator import LINEAR_ATTENTION
from fastattention.linear.validation import prepare
from fastattention.testing.linear import LinearCase, expected_gradients, linear_gradients, run_rule

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    """Makes plans of the current instruction set."""
    monkeypatch.setattr(LINEAR_ATTENTION, "_plans", {})


@sampled
@DTYPES
@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "tokens"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_results_are_right(isa: str, case: LinearCase, chunked: bool, dtype: torch.dtype) -> None:
    problem, inputs = prepare(case.tensors(dtype), case.options(chunked))
    check(problem, inputs, LINEAR_BACKENDS.get("cpu").make_call(problem, inputs)(inputs))


@sampled
@DTYPES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_are_right(isa: str, case: LinearCase, dtype: torch.dtype) -> None:
    check_gradients(case, dtype, True, "cpu")


@pytest.mark.parametrize("rule", ["head", "ssd"])
def test_gradients_of_gates_of_heads_keep_their_digits(isa: str, rule: str) -> None:
    """A difference of two sums errs by 5e-7 and 7e-7, torch by 2e-7."""
    case = LinearCase(rule, seqlen=200, headdim_k=64, headdim_v=64)
    given, options = case.tensors(torch.float32), case.options(chunked=True)
    found = linear_gradients(lambda inputs: LINEAR_ATTENTION(inputs, options, "cpu"), given)["gradient of g"]
    exact = expected_gradients(*prepare(given, options)).exact["gradient of g"]
    assert (found - exact).norm() <= 4e-7 * exact.norm()


@DTYPES
@pytest.mark.parametrize("rule", ["delta", "key"])
def test_results_do_not_depend_on_the_number_of_threads(isa: str, rule: str, dtype: torch.dtype) -> None:
    """The number decides how many columns of values a task has."""
    case = LinearCase(rule, seqlen=200, nheads=3, nheads_k=1, headdim_k=72, headdim_v=200, initial_state=True)
    found, options = [], case.options(chunked=True)
    for num_threads in (1, 2, 16):
        set_num_threads(num_threads)
        try:
            grads = linear_gradients(lambda x: LINEAR_ATTENTION(x, options, "cpu"), case.tensors(dtype))
            found.append([*run_rule(case.tensors(dtype), rule, backend="cpu"), *grads.values()])
        finally:
            set_num_threads(None)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@sampled
@DTYPES
@pytest.mark.parametrize("rule", ["delta", "head", "key", "kda", "ssd"])
@pytest.mark.parametrize("seqlen", [47, 48, 49, 63, 64, 65, 95, 96, 97, 129])
def test_any_length_around_a_chunk(isa: str, rule: str, seqlen: int, dtype: torch.dtype) -> None:
    case = LinearCase(rule, seqlen=seqlen, nheads=1, nheads_k=1, headdim_k=33, headdim_v=17, initial_state=True)
    problem, inputs = prepare(case.tensors(dtype), case.options(chunked=True))
    check(problem, inputs, LINEAR_BACKENDS.get("cpu").make_call(problem, inputs)(inputs))
