"""The cpu backend of linear attention: hands a validated call to the native library."""

from __future__ import annotations

from fastattention.backends.common.linear import why_not_kernels
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.backends.cpu.linear.call import CpuLinearCall, chunk_of
from fastattention.linear.backend import LinearBackend, Serve
from fastattention.linear.problem import RULES, LinearInputs, LinearProblem


class CpuLinearBackend(LinearBackend):
    """Computes in float32; bfloat16 operands use the instruction set's bfloat16 products, where it has them."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: LinearProblem) -> str | None:
        """Refuses other devices, and gradients."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors in host memory"
        return why_not_kernels(problem, RULES)

    def how(self, problem: LinearProblem) -> str:
        """Tokens of a chunk, and the instruction set."""
        isa = load_library().isa
        return f"{f'chunks of {chunk_of(problem.dtype, isa)} tokens' if problem.chunked else 'token by token'}, {isa}"

    def make_call(self, problem: LinearProblem, inputs: LinearInputs) -> Serve:
        """A call of the library whose parameters are set up once."""
        return CpuLinearCall(problem, inputs)
