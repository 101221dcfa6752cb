"""Backends for the list of cases: our kernels on the processor, as if on one chip or another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from conformance.calls import Call
from conformance.engines import Engine, forget_backends

from ascend.executor import CpuExecutedAscendBackend
from fastattention.backends import registry
from fastattention.backends.ascend.call import Launch
from fastattention.backends.ascend.chips import CHIPS
from fastattention.problem import Problem


class On910B2(CpuExecutedAscendBackend):
    name, chip = "ascend-910B2", CHIPS["910B2"]


class On910B3(CpuExecutedAscendBackend):
    name, chip = "ascend-910B3", CHIPS["910B3"]


class On910B4(CpuExecutedAscendBackend):
    name, chip = "ascend-910B4", CHIPS["910B4"]


# Each data type runs as if on another chip, so that tilings of several are executed.
BACKENDS = {torch.float16: On910B2, torch.bfloat16: On910B3, torch.float32: On910B4}


class ExecutedEngine(Engine):
    """A backend that is registered while it is active, and not otherwise."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> ExecutedEngine:
        return cls(BACKENDS[dtype].name)

    @contextmanager
    def active(self) -> Iterator[None]:
        backends = {backend.name: f"{__name__}:{backend.__name__}" for backend in BACKENDS.values()}
        with mock.patch.dict(registry.ORDER, backends):
            forget_backends()
            yield
        forget_backends()

    def refusal(self, problem: Problem) -> str | None:
        with self.active():
            return super().refusal(problem)


def launches_of(call: Call) -> list[Launch]:
    """What the backend of a call's data type would launch for it."""
    problem, inputs = call.prepare()
    launches: list[Launch] = []
    backend = BACKENDS[problem.dtype]()
    with mock.patch.object(backend, "_launch", launches.append):
        backend.forward(problem, inputs)
    return launches
