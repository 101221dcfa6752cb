"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from fastattention.attention import dispatch
from fastattention.backends import registry
from fastattention.backends.base import Backend


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def only_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes the given Backend classes the only ones registered, in their order."""

    def register(*backends: type[Backend]) -> None:
        module = ModuleType("backends_of_a_test")
        for backend in backends:
            setattr(module, backend.__name__, backend)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        order = {backend.name: f"{module.__name__}:{backend.__name__}" for backend in backends}
        monkeypatch.setattr(registry, "ORDER", order)
        forget()

    def forget() -> None:
        registry.get_backend.cache_clear()
        registry.select_backend.cache_clear()
        registry.select_merging_backend.cache_clear()
        dispatch.forget_plans()

    yield register
    forget()


@pytest.fixture
def no_plans() -> Iterator[None]:
    """No plan of a call before the test, and none after it."""
    dispatch.forget_plans()
    yield
    dispatch.forget_plans()
