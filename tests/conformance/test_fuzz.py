"""Random cases: what test_conformance.py promises for the list, for whatever else is a valid call.

`pytest --hypothesis-profile=explore` looks for new ones. A failure prints the case; give it a name in cases.py.
"""

from __future__ import annotations

import hypothesis
import torch
from hypothesis import given

from conformance import strategies
from conformance.check import check
from conformance.engines import ENGINES
from fastattention.testing.case import Case


def check_all(case: Case, dtype: torch.dtype) -> None:
    """On all engines in one example: each test draws its cases and computes what they must return once."""
    for engine in ENGINES:
        hypothesis.note(f"engine: {engine.name}")
        check(engine, case, dtype)


@given(case=strategies.dense_cases(), dtype=strategies.DTYPES)
def test_dense(case: Case, dtype: torch.dtype) -> None:
    check_all(case, dtype)


@given(case=strategies.varlen_cases(), dtype=strategies.DTYPES)
def test_varlen(case: Case, dtype: torch.dtype) -> None:
    check_all(case, dtype)


@given(case=strategies.kvcache_cases(), dtype=strategies.DTYPES)
def test_kvcache(case: Case, dtype: torch.dtype) -> None:
    check_all(case, dtype)
