"""The cpu backend: hands a validated call to the native library."""

from __future__ import annotations

from fastattention.backends.base import Backend
from fastattention.backends.common.bounded import BoundedDict
from fastattention.backends.common.layout import Strides, strides_of
from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.plan import CpuPlan
from fastattention.errors import LibraryError
from fastattention.problem import AttentionOutput, Inputs, Problem
from fastattention.threads import get_num_threads


class CpuBackend(Backend):
    """Native kernels for any CPU, the instruction set chosen at run time."""

    name = "cpu"

    def __init__(self) -> None:
        self._plans: BoundedDict[tuple[Problem, Strides], CpuPlan] = BoundedDict()

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        try:
            load_library()
        except LibraryError as error:
            return str(error)
        return None

    def why_not(self, problem: Problem) -> str | None:
        """Refuses other devices, gradients and dropout; serves everything else."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors on cpu"
        if problem.needs_grad:
            return "a gradient is needed and this backend has no backward; use backend='sdpa' or torch.no_grad()"
        if problem.dropout_p > 0.0:
            return f"dropout_p={problem.dropout_p} is not served; use dropout_p=0.0 or backend='sdpa'"
        return None

    def describe(self) -> str:
        """Instruction set in use, those to choose from, and threads."""
        library = load_library()
        return f"{library.isa} of {', '.join(library.isas)}; {get_num_threads()} threads"

    def plan(self, problem: Problem, inputs: Inputs) -> CpuPlan:
        """One call of the native library, appending included."""
        key = problem, strides_of(inputs)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = CpuPlan(problem, inputs)
        return plan

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Likewise, at once."""
        return self.plan(problem, inputs)(inputs)
