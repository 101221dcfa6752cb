"""The list of cases x engine x dtype: every combination in the deep tier, a third of the engines of a case in `all`."""

from __future__ import annotations

import pytest
import torch
from tiers import Tier, combinations, tier_of

from conformance.case import Case
from conformance.cases import CASES, FOR_GPUS
from conformance.check import check
from conformance.engines import ENGINES, Engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    tier = tier_of(metafunc.config)
    runs = []
    for cases, tier_of_cases in (
        ([case for case in CASES if case not in FOR_GPUS], tier),
        (FOR_GPUS, Tier.DEEP if tier is Tier.DEEP else Tier.QUICK),
    ):
        runs += combinations(tier_of_cases, cases, ENGINES, list(DTYPES))
    ids = [f"{case.name}-{dtype}-{engine.name}" for case, engine, dtype in runs]
    metafunc.parametrize(("case", "engine", "dtype"), runs, ids=ids)


def test_is_right_repeats_and_writes_nothing_else(case: Case, engine: Engine, dtype: str) -> None:
    check(engine, case, DTYPES[dtype])
