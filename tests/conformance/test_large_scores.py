"""Scores near the limits of float32, on every instruction set of the CPU and in torch."""

from __future__ import annotations

import pytest
from tiers import sampled

from conformance.engines import ENGINES, Engine
from conformance.large_scores import check_large_scores
from conformance.test_conformance import DTYPES
from fastattention.attention.backend import ATTENTION_BACKENDS


@sampled
@pytest.mark.parametrize(("times", "keys", "cached"), [(1, 300, False), (6, 300, False), (1, 300, True), (6, 70, True)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_scores_may_be_as_large_as_float32_has_them(
    engine: Engine, dtype: str, times: int, keys: int, cached: bool
) -> None:
    with engine.active():
        check_large_scores(ATTENTION_BACKENDS.get(engine.backend), DTYPES[dtype], times, keys, cached)
