"""Results of linear attention on every backend, against the recurrence in float64."""

from __future__ import annotations

import pytest
import torch

from fastattention.linear.dispatch import ORDER, get_backend
from fastattention.linear.validation import prepare
from tests.linear.cases import CASES
from tests.linear.oracle import check

BACKENDS = [name for name in ORDER if get_backend(name).why_unavailable() is None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("chunked", [True, False], ids=["chunks", "tokens"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_linear_attention_is_right(backend: str, name: str, chunked: bool, dtype: torch.dtype) -> None:
    case = CASES[name]
    problem, inputs = prepare(case.tensors(dtype), case.options(chunked))
    engine = get_backend(backend)
    if reason := engine.why_not(problem):
        pytest.skip(reason)
    check(problem, inputs, engine.plan(problem, inputs)(inputs))
