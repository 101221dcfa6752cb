"""Fixtures of the unit tests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.merge import select_merging_backend
from fastattention.backends.sdpa import gpu_kernels
from fastattention.engine.operator import forget_plans


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def only_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A function that makes the given AttentionBackend classes the only ones registered, in their order."""

    def register(*backends: type[AttentionBackend]) -> None:
        module = ModuleType("backends_of_a_test")
        for backend in backends:
            setattr(module, backend.__name__, backend)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        order = {backend.name: f"{module.__name__}:{backend.__name__}" for backend in backends}
        monkeypatch.setattr(ATTENTION_BACKENDS, "order", order)
        forget()

    def forget() -> None:
        ATTENTION_BACKENDS.forget()
        ATTENTION_BACKENDS.forget()
        select_merging_backend.cache_clear()
        forget_plans()

    yield register
    forget()


@pytest.fixture
def no_plans() -> Iterator[None]:
    """No plan of a call before the test, and none after it."""
    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of compute capability 9.0, to torch's kernels that are asked and not called."""
    monkeypatch.setattr(gpu_kernels, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_kernels, "_cudnn_takes", lambda problem: problem.headdim <= 256)
    gpu_kernels._share_keys.cache_clear()
    yield
    gpu_kernels._share_keys.cache_clear()
