"""The list of cases x dtype x engine."""

from __future__ import annotations

import pytest
import torch

from conformance.case import Case
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import Engine, every_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@every_engine  # varies fastest, so that the expected result of a case is computed once
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_is_right_repeats_and_writes_nothing_else(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    check(engine, case, dtype)
