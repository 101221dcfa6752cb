"""The problem of a case that is built without values is that of its call."""

from __future__ import annotations

import pytest
import torch
from tiers import sampled

from conformance.cases import CASES
from fastattention.testing.calls import build_call, problem_of
from fastattention.testing.case import Case


@sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_problem_without_numbers_is_that_of_the_call(case: Case, dtype: torch.dtype) -> None:
    problem, _ = build_call(case, dtype).prepare()
    assert problem_of(case, dtype) == problem
