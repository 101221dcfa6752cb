"""The cuda backend of the causal convolution: what it serves, and by which kernels."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.convolution import why_not_kernels
from fastattention.backends.cuda.convolution.call import ConvolutionCall, differentiate
from fastattention.backends.cuda.convolution.heuristics import divide
from fastattention.convolution.backend import ConvolutionBackend, Serve
from fastattention.convolution.problem import (
    ConvolutionGradients,
    ConvolutionInputs,
    ConvolutionOutput,
    ConvolutionProblem,
)
from fastattention.gpu_runtime import device, module
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch

_MOST_CTAS = 2**31 - 1  # CTAs of a launch; kernels count tokens of a row in as many bits


class CudaConvolutionBackend(ConvolutionBackend):
    """Our kernels for GPUs from Pascal on. They compute in float32 and round once."""

    name = "cuda"
    has_backward = True

    def why_unavailable(self) -> str | None:
        """Why no kernel can run here."""
        return device.why_unavailable()

    def why_not(self, problem: ConvolutionProblem) -> str | None:
        """Refuses gradients of an update, transforms of torch.func, and calls that are too large for one launch."""
        if (reason := self._why_not_device(problem) or why_not_kernels(problem)) is not None:
            return reason
        if max(divide(problem, self._limits(problem).num_sms).num_ctas, problem.seqlen) > _MOST_CTAS:
            return f"{problem.axes} is more than one launch takes; divide the batch, or use backend='torch'"
        return None

    def make_call(self, problem: ConvolutionProblem, inputs: ConvolutionInputs) -> Serve:
        """One launch."""
        return ConvolutionCall(problem, inputs, self._limits(problem), self._launchers(problem))

    def backward(
        self,
        problem: ConvolutionProblem,
        inputs: ConvolutionInputs,
        result: ConvolutionOutput,
        grads: ConvolutionGradients,
    ) -> dict[str, Tensor]:
        """Two launches. The results have the same bits in every run on GPUs with as many multiprocessors."""
        return differentiate(problem, inputs, grads, self._limits(problem), self._launchers(problem))

    def _launchers(self, problem: ConvolutionProblem) -> Callable[[KernelLaunch], Callable[[Params], None]]:
        return lambda launch: self._launcher(launch, problem)

    # The emulator of the tests replaces these methods.

    def _why_not_device(self, problem: ConvolutionProblem) -> str | None:
        return device.why_not(problem.device)

    def _limits(self, problem: ConvolutionProblem) -> Limits:
        return module.device_limits(device.index_of(problem.device))

    def _launcher(self, launch: KernelLaunch, problem: ConvolutionProblem) -> Callable[[Params], None]:
        return device.launcher(launch, problem.device)
