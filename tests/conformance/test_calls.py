"""The problem of a case that is built without values is that of its call."""

from __future__ import annotations

import pytest
import torch
from tiers import sampled

from conformance.cases import CASES
from fastattention.testing.calls import build_call, problem_of
from fastattention.testing.case import Case
from fastattention.testing.devices import moved


@sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_problem_without_numbers_is_that_of_the_call(case: Case, dtype: torch.dtype) -> None:
    problem, _ = build_call(case, dtype).prepare()
    assert problem_of(case, dtype) == problem


def test_a_call_that_is_moved_shares_its_memory_as_before() -> None:
    """Appended keys are values too where values are columns of the keys."""
    case = next(case for case in CASES if case.name == "latent-append-30-16-heads-64")
    there = moved(build_call(case, torch.bfloat16), "meta")
    k_cache, v_cache = (there.arguments[name].untyped_storage() for name in ("k_cache", "v_cache"))
    assert k_cache._cdata == v_cache._cdata
