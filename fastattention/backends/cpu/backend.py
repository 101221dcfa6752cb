"""The cpu backend: hands a validated call to the native library."""

from __future__ import annotations

from torch import Tensor

from fastattention.backends.base import Backend
from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.plan import CpuPlan
from fastattention.backends.cpu.prepared import PreparedCall
from fastattention.errors import LibraryError
from fastattention.problem import AttentionOutput, Inputs, Problem
from fastattention.threads import get_num_threads


class CpuBackend(Backend):
    """Native kernels for any CPU, the instruction set chosen at run time."""

    name = "cpu"

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
        return CpuPlan(problem, inputs)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Likewise, for a single call."""
        return CpuPlan(problem, inputs)(inputs)

    def prepare(self, problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, num_threads: int) -> PreparedCall:
        """One call of the native library with a cache, to be run later: lengths and pages are those of now.

        out, lse: contiguous, as `forward` gives them; num_threads: at most, the thread that runs it included
        """
        return CpuPlan(problem, inputs).prepare(inputs, out, lse, num_threads)
