"""The cpu backend of the causal convolution: hands a validated call to the native library."""

from __future__ import annotations

from torch import Tensor

from fastattention.backends.common.convolution import why_not_kernels
from fastattention.backends.cpu.convolution.call import CpuConvolutionCall
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.convolution.backend import ConvolutionBackend, Serve
from fastattention.convolution.problem import (
    ConvolutionGradients,
    ConvolutionInputs,
    ConvolutionOutput,
    ConvolutionProblem,
)


class CpuConvolutionBackend(ConvolutionBackend):
    """Native kernels for any CPU, the instruction set chosen at run time. Computes in float32 and rounds once."""

    name = "cpu"
    has_backward = True

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: ConvolutionProblem) -> str | None:
        """Refuses other devices, gradients of an update, and transforms of torch.func."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors in host memory"
        return why_not_kernels(problem)

    def how(self, problem: ConvolutionProblem) -> str:
        """The instruction set."""
        return load_library().isa

    def make_call(self, problem: ConvolutionProblem, inputs: ConvolutionInputs) -> Serve:
        """A call of the library whose parameters are set up once."""
        return CpuConvolutionCall(problem, inputs)

    def backward(
        self,
        problem: ConvolutionProblem,
        inputs: ConvolutionInputs,
        result: ConvolutionOutput,
        grads: ConvolutionGradients,
    ) -> dict[str, Tensor]:
        """One call of the native library. The results have the same bits with any number of threads."""
        return CpuConvolutionCall(problem, inputs).backward(inputs, grads)
