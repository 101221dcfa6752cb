"""Fixtures of tests of the native library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.backends.cpu.library import available_isas, load_library
from fastattention.engine.operator import forget_plans


def _forget() -> None:
    """Makes backends, and with them the instruction set, be chosen again."""
    load_library.cache_clear()
    ATTENTION_BACKENDS.forget()
    forget_plans()


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each instruction set of this processor in turn, which calls use meanwhile."""
    monkeypatch.setenv("FASTATTENTION_CPU_ISA", request.param)
    _forget()
    yield request.param
    _forget()
