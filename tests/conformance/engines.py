"""The engines that tests run on: every backend of this machine, the cpu backend once for each instruction set."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import pytest
from torch import Tensor

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.attention.merge import select_merging_backend
from fastattention.attention.problem import Problem
from fastattention.backends.cpu.library import available_isas, load_library
from fastattention.engine.operator import forget_plans
from fastattention.errors import LibraryError
from fastattention.testing.calls import Call
from fastattention.testing.devices import copied_back, moved


class Engine(NamedTuple):
    """A backend, and for cpu the instruction set that FASTATTENTION_CPU_ISA names."""

    backend: str
    isa: str | None = None

    @property
    def name(self) -> str:
        return self.backend if self.isa is None else f"{self.backend}-{self.isa}"

    @property
    def device(self) -> str:
        """Where calls run."""
        return "cpu"

    @contextmanager
    def active(self) -> Iterator[None]:
        """Calls with backend=self.backend use the instruction set meanwhile."""
        if self.isa is None:
            yield
            return
        try:
            with mock.patch.dict(os.environ, FASTATTENTION_CPU_ISA=self.isa):
                load_library.cache_clear()
                yield
        finally:
            load_library.cache_clear()

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        """(out, lse) of the call."""
        return call.run(self.backend)

    def run_in_another_order(self, call: Call) -> tuple[Tensor, Tensor]:
        """The same, with parts computed in another order where the engine can choose one."""
        return self.run(call)

    def run_without_lse(self, call: Call) -> Tensor:
        """out of the call without lse."""
        return call.run_without_lse(self.backend)

    def refusal(self, problem: Problem) -> str | None:
        """Why the engine does not serve the problem. test_refusals.py says which reasons it may have."""
        with self.active():
            return ATTENTION_BACKENDS.verdict(problem, self.backend).reason


class GpuEngine(Engine):
    """A backend on calls that are moved to the first GPU."""

    @property
    def device(self) -> str:
        return "cuda"

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        on_device = moved(call, "cuda")
        out, lse = on_device.run(self.backend)
        copied_back(call, on_device)
        return out.cpu(), lse.cpu()

    def run_without_lse(self, call: Call) -> Tensor:
        return moved(call, "cuda").run_without_lse(self.backend).cpu()


class RegisteredEngine(Engine):
    """An engine whose backends are registered while it is active, and not otherwise."""

    @property
    def registered(self) -> dict[str, str]:
        """Name -> module:class, as in ATTENTION_BACKENDS.order."""
        raise NotImplementedError

    @contextmanager
    def active(self) -> Iterator[None]:
        try:
            with mock.patch.dict(ATTENTION_BACKENDS.order, self.registered):
                forget_backends()
                yield
        finally:
            forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        with self.active():
            return super().refusal(problem)


def forget_backends() -> None:
    """The next call asks the registry, and every backend the environment, anew."""
    ATTENTION_BACKENDS.forget()
    select_merging_backend.cache_clear()
    forget_plans()


def _isas() -> list[str | None]:
    try:
        return [*available_isas()]
    except LibraryError:
        return [None]  # test_engines.py fails and shows the reason


_ALL = [
    Engine(backend, isa) for backend in ATTENTION_BACKENDS.order for isa in (_isas() if backend == "cpu" else [None])
]
ENGINES = [engine for engine in _ALL if ATTENTION_BACKENDS.get(engine.backend).why_unavailable() is None]

every_engine = pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
