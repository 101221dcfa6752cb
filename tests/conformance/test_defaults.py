"""A user's default device and dtype change no bit, on any engine."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiers import covering, tier_of

from conformance.cases import CASES
from conformance.engines import ENGINES, Engine
from conformance.test_conformance import DTYPES
from fastattention.testing.calls import build_call, problem_of
from fastattention.testing.case import Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    runs = covering(tier_of(metafunc.config), itertools.product(CASES, ENGINES, DTYPES))
    ids = [f"{case.name}-{dtype}-{engine.name}" for case, engine, dtype in runs]
    metafunc.parametrize(("case", "engine", "dtype"), runs, ids=ids)


def test_defaults_change_nothing(case: Case, engine: Engine, dtype: str) -> None:
    problem = problem_of(case, DTYPES[dtype])
    if (reason := engine.refusal(problem)) is not None:
        pytest.skip(reason)
    usual, changed = (build_call(case, DTYPES[dtype]) for _ in range(2))
    with engine.active():
        out, lse = engine.run(usual)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                out_changed, lse_changed = engine.run(changed)
        finally:
            torch.set_default_dtype(torch.float32)
    assert torch.equal(out, out_changed)
    assert torch.equal(lse, lse_changed)
