"""The cuda backend of linear attention: what it serves, and by which kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastattention import environment
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.cuda.linear.chunk_call import ChunkedCall
from fastattention.backends.cuda.linear.chunk_heuristics import GradientKernels, choose_gradient_kernels
from fastattention.backends.cuda.linear.gradient_call import ChunkedGradients
from fastattention.backends.cuda.linear.step_call import StepCall
from fastattention.backends.cuda.linear.step_heuristics import choose_step, num_ctas
from fastattention.gpu_runtime import device, module
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.backend import LinearBackend, Serve
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearOutput, LinearProblem

_MOST_CTAS = 2**31 - 1  # CTAs of a launch


class CudaLinearBackend(LinearBackend):
    """Our kernels for GPUs from Pascal on."""

    name = "cuda"
    has_backward = True

    def why_unavailable(self) -> str | None:
        """Why no kernel can run here."""
        return device.why_unavailable()

    def why_not(self, problem: LinearProblem) -> str | None:
        """Refuses chunks and gradients of float32, and more states than a launch has CTAs for."""
        if (reason := self._why_not_device(problem)) is not None:
            return reason
        if problem.in_transform:
            return why_not_in_transform("torch")
        if problem.chunked and problem.dtype is torch.float32:
            return "chunks of float32 are not served; use float16, bfloat16, the recurrent function or backend='torch'"
        if problem.grads and (reason := self._why_no_gradients(problem)) is not None:
            return reason
        num_states = problem.num_sequences * problem.nheads
        if num_ctas(problem, choose_step(problem, self._limits(problem).num_sms).columns) > _MOST_CTAS:
            return f"{num_states} states are more than one launch takes; divide the batch, or use backend='torch'"
        return None

    def make_call(self, problem: LinearProblem, inputs: LinearInputs) -> Serve:
        """Three launches for a call in chunks, one for a call token by token."""
        limits = self._limits(problem)

        def launcher(launch: KernelLaunch) -> Callable[[Params], None]:
            return self._launcher(launch, problem)

        if problem.chunked:
            return ChunkedCall(problem, environment.cuda_arch() or limits.arch, limits, launcher)
        return StepCall(problem, inputs, limits, launcher)

    def _why_no_gradients(self, problem: LinearProblem) -> str | None:
        if problem.dtype is torch.float32:
            return "gradients of float32 are not served; use float16, bfloat16, backend='torch' or torch.no_grad()"
        if self._gradient_kernels(problem) is None:
            return (
                f"no kernels for gradients with headdim_k={problem.headdim_k} fit this GPU; use backend='torch' or "
                "torch.no_grad()"
            )
        return None

    def _gradient_kernels(self, problem: LinearProblem) -> GradientKernels | None:
        limits = self._limits(problem)
        return choose_gradient_kernels(problem, environment.cuda_arch() or limits.arch, limits)

    def backward(
        self, problem: LinearProblem, inputs: LinearInputs, result: LinearOutput, grads: LinearGradients
    ) -> Mapping[str, Tensor]:
        """Gradients by five launches. States before chunks are computed again."""
        kernels = self._gradient_kernels(problem)
        assert kernels is not None, "why_not refuses such a problem"

        def launcher(launch: KernelLaunch) -> Callable[[Params], None]:
            return self._launcher(launch, problem)

        arch = environment.cuda_arch() or self._limits(problem).arch
        return ChunkedGradients(problem, arch, kernels, launcher)(inputs, grads)

    # The emulator of the tests replaces these methods.

    def _why_not_device(self, problem: LinearProblem) -> str | None:
        return device.why_not(problem.device)

    def _limits(self, problem: LinearProblem) -> Limits:
        return module.device_limits(device.index_of(problem.device))

    def _launcher(self, launch: KernelLaunch, problem: LinearProblem) -> Callable[[Params], None]:
        return device.launcher(launch, problem.device)
