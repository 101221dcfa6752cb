"""Scores of any size that float32 has, on every instruction set of the CPU and in torch."""

from __future__ import annotations

import pytest
from tiers import sampled

from conformance.engines import ENGINES, Engine
from conformance.gradients import OURS
from conformance.large_scores import (
    SCALES,
    check_large_gradients,
    check_large_products,
    check_large_scores,
    check_large_sinks,
)
from conformance.test_conformance import DTYPES
from fastattention.attention.backend import ATTENTION_BACKENDS

# tests/cuda/test_large_scores.py has those of GPUs.
ON_CPU = [engine for engine in ENGINES if engine.backend in ("cpu", "sdpa")]
every_engine = pytest.mark.parametrize("engine", ON_CPU, ids=lambda engine: engine.name)
every_backward = pytest.mark.parametrize(
    "engine", [engine for engine in ON_CPU if engine in OURS], ids=lambda engine: engine.name
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@sampled
@pytest.mark.parametrize(("times", "keys", "cached"), [(1, 300, False), (6, 300, False), (1, 300, True), (6, 70, True)])
@every_dtype
@every_engine
def test_a_bias_may_be_as_large_as_float32_has_it(
    engine: Engine, dtype: str, times: int, keys: int, cached: bool
) -> None:
    with engine.active():
        check_large_scores(ATTENTION_BACKENDS.get(engine.backend), DTYPES[dtype], times, keys, cached)


@sampled
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize(("scale", "size"), SCALES)
@every_dtype
@every_engine
def test_products_may_be_large(engine: Engine, dtype: str, scale: float, size: float, rows: int) -> None:
    with engine.active():
        check_large_products(ATTENTION_BACKENDS.get(engine.backend), DTYPES[dtype], scale, size, rows)


@pytest.mark.parametrize("engine", [engine for engine in ON_CPU if engine.isa], ids=lambda engine: engine.name)
def test_products_in_int8_may_be_large(engine: Engine) -> None:
    with engine.active():
        check_large_products(
            ATTENTION_BACKENDS.get(engine.backend), DTYPES["bfloat16"], *SCALES[0], rows=70, qk_dtype="int8"
        )


@sampled
@pytest.mark.parametrize("modified", [False, True])
@every_dtype
@every_engine
def test_sinks_may_be_large(engine: Engine, dtype: str, modified: bool) -> None:
    with engine.active():
        check_large_sinks(ATTENTION_BACKENDS.get(engine.backend), DTYPES[dtype], modified)


@sampled
@pytest.mark.parametrize("scale", [None, 1e9])
@every_dtype
@every_backward
def test_gradients_of_large_scores_are_finite_and_right(engine: Engine, dtype: str, scale: float | None) -> None:
    with engine.active():
        check_large_gradients(ATTENTION_BACKENDS.get(engine.backend), DTYPES[dtype], scale)
