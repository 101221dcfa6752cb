"""What is promised of calls with a cache holds for calls of a store that has the same tokens."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given

from conformance import strategies
from conformance.case import KvCacheCase
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import Engine
from conformance.store_engine import STORE_ENGINES, has_store
from conformance.test_conformance import DTYPES

STORE_CASES = [case for case in CASES if has_store(case)]


@pytest.mark.parametrize("engine", STORE_ENGINES, ids=[engine.name for engine in STORE_ENGINES])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", STORE_CASES, ids=[case.name for case in STORE_CASES])
def test_a_store_is_right_repeats_and_writes_nothing_else(
    engine: Engine, dtype: torch.dtype, case: KvCacheCase
) -> None:
    check(engine, case, dtype)


@given(case=strategies.kvcache_cases(), dtype=strategies.DTYPES)
def test_random_calls_of_stores(case: KvCacheCase, dtype: torch.dtype) -> None:
    for engine in STORE_ENGINES:
        hypothesis.note(f"engine: {engine.name}")
        check(engine, replace(case, leftpad=None, stored="as_q"), dtype)
