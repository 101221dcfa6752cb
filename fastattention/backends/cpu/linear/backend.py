"""The cpu backend of linear attention: hands a validated call to the native library."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.backends.cpu.linear.call import CpuLinearCall, chunk_of, linear_gradients
from fastattention.linear.backend import LinearBackend, Serve
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearOutput, LinearProblem


class CpuLinearBackend(LinearBackend):
    """Computes in float32; bfloat16 operands use the instruction set's bfloat16 products, where it has them."""

    name = "cpu"
    has_backward = True

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: LinearProblem) -> str | None:
        """Refuses other devices, and transforms of functions."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors in host memory"
        return why_not_in_transform("torch") if problem.in_transform else None

    def how(self, problem: LinearProblem) -> str:
        """Tokens of a chunk, and the instruction set."""
        isa = load_library().isa
        return f"{f'chunks of {chunk_of(problem.dtype, isa)} tokens' if problem.chunked else 'token by token'}, {isa}"

    def make_call(self, problem: LinearProblem, inputs: LinearInputs) -> Serve:
        """A call of the library whose parameters are set up once."""
        return CpuLinearCall(problem, inputs)

    def backward(
        self, problem: LinearProblem, inputs: LinearInputs, result: LinearOutput, grads: LinearGradients
    ) -> Mapping[str, Tensor]:
        """Gradients by the native library. States before chunks are computed again."""
        return linear_gradients(problem, inputs, grads)
