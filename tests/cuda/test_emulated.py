"""The list of cases on the kernels of every architecture, emulated, and what these refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import emulator
import pytest
import torch
from conformance.calls import build_call
from conformance.case import Case, KvCacheCase
from conformance.cases import CASES
from conformance.check import check
from conformance.engines import Engine

from fastattention.backends import registry
from fastattention.problem import Problem


class EmulatedEngine(Engine):
    """A backend that is registered while it is active, and not otherwise."""

    @contextmanager
    def active(self) -> Iterator[None]:
        backends = {backend.name: f"emulator:{backend.__name__}" for backend in emulator.EMULATED}
        with mock.patch.dict(registry.ORDER, backends):
            _forget_backends()
            yield
        _forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        with self.active():
            return super().refusal(problem)


def _forget_backends() -> None:
    registry.get_backend.cache_clear()
    registry.select_backend.cache_clear()


ENGINES = [EmulatedEngine(backend.name) for backend in emulator.EMULATED]
every_engine = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
SERVED = [case for case in CASES if not isinstance(case, KvCacheCase)]
CACHES = [case for case in CASES if isinstance(case, KvCacheCase)]


@every_engine
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("case", SERVED, ids=[case.name for case in SERVED])
def test_is_right_repeats_and_writes_nothing_else(engine: Engine, dtype: torch.dtype, case: Case) -> None:
    check(engine, case, dtype)
