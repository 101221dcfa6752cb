"""The list of cases x engine x dtype: below the deep tier each case once, and engines and dtypes meet its features."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiers import covering, tier_of

from conformance.cases import CASES
from conformance.check import check
from conformance.engines import ENGINES, Engine
from fastattention.testing.case import Case

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every_run = itertools.product(CASES, ENGINES, DTYPES)
    runs = covering(tier_of(metafunc.config), every_run, each=lambda run: run[0].name)
    ids = [f"{case.name}-{dtype}-{engine.name}" for case, engine, dtype in runs]
    metafunc.parametrize(("case", "engine", "dtype"), runs, ids=ids)


def test_is_right_repeats_and_writes_nothing_else(case: Case, engine: Engine, dtype: str) -> None:
    check(engine, case, DTYPES[dtype])
