"""A cuda backend on tensors of the processor: what emulated backends of every family share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emulator import Range, Report, launch

from fastattention.backends.common.c_struct import Params
from fastattention.gpu_runtime.chips import CHIPS, Limits
from fastattention.gpu_runtime.module import KernelLaunch


class OneChip:
    """Comes before a cuda backend whose kernels depend only on the number of multiprocessors of one chip."""

    def __init__(self, num_sms: int) -> None:
        super().__init__()
        self.limits = CHIPS["A100"]._replace(num_sms=num_sms)
        self.launches: list[KernelLaunch] = []
        self.reports: list[Report] = []

    def ranges_of(self, params: Params, problem: Any) -> list[Range]:
        """The memory that a launch may access in vectors."""
        raise NotImplementedError

    def why_unavailable(self) -> str | None:
        return None

    def _why_not_device(self, problem: Any) -> str | None:
        return None if problem.device.type == "cpu" else f"tensors are on {problem.device}; the emulator takes cpu"

    def _limits(self, problem: Any) -> Limits:
        return self.limits

    def _launcher(self, step: KernelLaunch, problem: Any) -> Callable[[Params], None]:
        def emulate(params: Params) -> None:
            self.launches.append(step)
            self.reports.append(launch(step, params, self.ranges_of(params, problem)))

        return emulate
