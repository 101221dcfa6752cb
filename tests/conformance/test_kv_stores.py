"""The promises for calls with a cache hold for calls of a store that has the same tokens."""

from __future__ import annotations

import itertools
from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given
from tiers import covering, tier_of

from conformance import strategies
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import Engine
from conformance.store_engine import DENSE_STORE_ENGINES, PACKED_STORE_ENGINES, has_store
from conformance.test_conformance import DTYPES
from fastattention.testing.case import KvCacheCase

STORE_CASES = [case for case in CASES if has_store(case)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "engine" not in metafunc.fixturenames:
        return
    every_run = itertools.product(STORE_CASES, [*PACKED_STORE_ENGINES, *DENSE_STORE_ENGINES], DTYPES)
    runs = covering(tier_of(metafunc.config), every_run)
    ids = [f"{case.name}-{dtype}-{engine.name}" for case, engine, dtype in runs]
    metafunc.parametrize(("case", "engine", "dtype"), runs, ids=ids)


def test_a_store_is_right_repeats_and_writes_nothing_else(case: KvCacheCase, engine: Engine, dtype: str) -> None:
    check(engine, case, DTYPES[dtype])


@given(case=strategies.kvcache_cases(), dtype=strategies.DTYPES)
def test_random_calls_of_stores(case: KvCacheCase, dtype: torch.dtype) -> None:
    for engine in (*DENSE_STORE_ENGINES, *PACKED_STORE_ENGINES):
        hypothesis.note(f"engine: {engine.name}")
        check(engine, replace(case, leftpad=None, stored="as_q"), dtype)
