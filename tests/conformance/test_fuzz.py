"""Random cases: the promises of test_conformance.py for all other valid calls.

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
    """Checks all engines in one example, so that cases and exact results are computed once."""
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
