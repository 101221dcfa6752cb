"""The cpu backend of the indexer: hands a validated call to the native library."""

from __future__ import annotations

from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.cpu.indexer.call import CpuIndexerCall
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.indexer.backend import IndexerBackend, Serve
from fastattention.indexer.problem import IndexerInputs, IndexerProblem


class CpuIndexerBackend(IndexerBackend):
    """Native kernels for any CPU, the instruction set chosen at run time."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: IndexerProblem) -> str | None:
        """Refuses other devices, and transforms of functions."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors in host memory"
        return why_not_in_transform("torch") if problem.in_transform else None

    def how(self, problem: IndexerProblem) -> str:
        """The instruction set."""
        return load_library().isa

    def make_call(self, problem: IndexerProblem, inputs: IndexerInputs) -> Serve:
        """A call of the library whose parameters are set up once."""
        return CpuIndexerCall(problem, inputs)
