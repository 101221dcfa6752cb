"""Backends for the list of cases: our kernels on the processor, as if on one chip or another."""

from __future__ import annotations

from unittest import mock

import torch
from conformance.engines import RegisteredEngine

from ascend.executor import CpuExecutedAscendBackend
from fastattention.backends.ascend.call import Launch
from fastattention.backends.ascend.chips import CHIPS
from fastattention.testing.calls import Call


class On910B2(CpuExecutedAscendBackend):
    name, chip = "ascend-910B2", CHIPS["910B2"]


class On910B4(CpuExecutedAscendBackend):
    name, chip = "ascend-910B4", CHIPS["910B4"]


class OnDieOf910C(CpuExecutedAscendBackend):
    name, chip = "ascend-910_9362", CHIPS["910_9362"]


# Each data type runs as if on another chip, so that tilings of several are executed.
BACKENDS = {torch.float16: On910B2, torch.bfloat16: On910B4, torch.float32: OnDieOf910C}


class ExecutedEngine(RegisteredEngine):
    """An engine for one of these backends."""

    @classmethod
    def of(cls, dtype: torch.dtype) -> ExecutedEngine:
        return cls(BACKENDS[dtype].name)

    @property
    def registered(self) -> dict[str, str]:
        return {backend.name: f"{__name__}:{backend.__name__}" for backend in BACKENDS.values()}


def launches_of(call: Call) -> list[Launch]:
    """What the backend of a call's data type would launch for it."""
    problem, inputs = call.prepare()
    launches: list[Launch] = []
    backend = BACKENDS[problem.dtype]()
    with mock.patch.object(backend, "_launch", launches.append):
        backend.forward(problem, inputs)
    return launches
