"""The kernel of the selection, emulated, in every order of CTAs and warps; and attention to quantized selected keys."""

from __future__ import annotations

from typing import Any

import emulator
import pytest
import torch
from emulated_backend import OneChip
from emulator import Range
from selection.cases import CASES, Case, check, slots_of
from tiers import slow
from unit.samples import quantized_selection

from fastattention import ArgumentError, fast_attn_selected_func
from fastattention.attention.selection.problem import SelectionProblem
from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.selection.backend import CudaSelectionBackend
from fastattention.engine.operator import request_of


class EmulatedSelection(OneChip, CudaSelectionBackend):
    """The backend on tensors of the processor. The kernel accesses no memory in vectors."""

    def __init__(self) -> None:
        super().__init__(num_sms=4)

    def ranges_of(self, params: Params, problem: Any) -> list[Range]:
        return []


SOME = torch.arange(11) % 3 == 0


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_slots_are_right(case: Case) -> None:
    check(EmulatedSelection(), case)


@pytest.mark.parametrize("name", ["varlen", "many-blocks", "many"])
def test_slots_do_not_depend_on_the_order_of_ctas_and_warps(name: str) -> None:
    for seed in (1, 2):
        with emulator.shuffled(seed):
            check(EmulatedSelection(), CASES[name])


@pytest.mark.parametrize("wrong", [40, 2**31 - 1, -2, -(2**31), 2**62])
def test_what_is_no_key_is_dropped_where_values_are_not_checked(wrong: int) -> None:
    for key_block in (1, 4):
        given, options = Case(key_block=key_block, dtype=torch.int64 if wrong == 2**62 else torch.int32).arguments()
        expected = slots_of(EmulatedSelection(), given._replace(indices=given.indices.masked_fill(SOME, -1)), options)
        given = given._replace(indices=given.indices.masked_fill(SOME, wrong))
        assert slots_of(EmulatedSelection(), given, options) == expected


def test_queries_after_the_last_sequence_see_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in CUDA graphs of batches that vary."""
    monkeypatch.setattr("fastattention.attention.selection.operators.are_checked", lambda tensor: False)
    for causal in (False, True):
        given, options = Case(causal=causal).arguments()
        assert given.cu_seqlens_q is not None
        expected = slots_of(EmulatedSelection(), given, options)
        given.cu_seqlens_q[-1] = 6
        found = slots_of(EmulatedSelection(), given, options)
        assert found[:4] == expected[:4]
        assert found[6:] == [[]] * 3


def test_indices_are_checked_when_values_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given, options = Case().arguments()
    given.indices[3, 0, 0] = 3
    slots_of(EmulatedSelection(), given, options)
    monkeypatch.setenv("FASTATTENTION_CHECK_NUMBERS", "1")
    with pytest.raises(ArgumentError, match="indices name key 3 for query 3"):
        slots_of(EmulatedSelection(), given, options)


def test_a_call_that_is_too_large_is_refused() -> None:
    problem = SelectionProblem(2**31, 1, 1, 1, 2**31, 5, 5, 1, False, 5, 1, 0, torch.device("cpu"), torch.int32)
    assert "are more than 2147483647" in str(EmulatedSelection().why_not(problem))


@slow
@pytest.mark.parametrize("backend", [emulator.EmulatedSm75, emulator.EmulatedSm80])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_keys_are_selected_too(cache_dtype: torch.dtype, backend: type[emulator.EmulatedCudaBackend]) -> None:
    call, exact = quantized_selection(cache_dtype)
    operator, given, options, _, returned = request_of(fast_attn_selected_func, **call)
    found = returned(backend().forward(*operator.prepare(given, options)))
    for result, right in zip(found, fast_attn_selected_func(**exact, backend="sdpa"), strict=True):
        torch.testing.assert_close(result.float(), right, atol=2e-3, rtol=1e-3)
