"""The cuda backend of linear attention: what it serves, and by which kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fastattention import environment
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.cuda.linear.chunk_call import ChunkedCall
from fastattention.backends.cuda.linear.chunk_heuristics import choose_gradient_kernels
from fastattention.backends.cuda.linear.gradient_call import ChunkedGradients
from fastattention.backends.cuda.linear.step_call import StepCall
from fastattention.backends.cuda.linear.step_heuristics import choose_step, num_ctas
from fastattention.engine.bounded import BoundedDict
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

    def __init__(self) -> None:
        self._gradient_calls: BoundedDict[tuple[LinearProblem, int], ChunkedGradients] = BoundedDict()

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
        launcher = functools.partial(self._launcher, problem=problem)
        if problem.chunked:
            return ChunkedCall(problem, _arch(limits), limits, launcher)
        return StepCall(problem, inputs, limits, launcher)

    def _why_no_gradients(self, problem: LinearProblem) -> str | None:
        if problem.dtype is torch.float32:
            return "gradients of float32 are not served; use float16, bfloat16, backend='torch' or torch.no_grad()"
        limits = self._limits(problem)
        if choose_gradient_kernels(problem, _arch(limits), limits) is None:
            return (
                f"no kernels for gradients with headdim_k={problem.headdim_k} fit this GPU; use backend='torch' or "
                "torch.no_grad()"
            )
        return None

    def backward(
        self, problem: LinearProblem, inputs: LinearInputs, result: LinearOutput, grads: LinearGradients
    ) -> Mapping[str, Tensor]:
        """Gradients by five launches. States before chunks are computed again."""
        limits = self._limits(problem)
        arch = _arch(limits)
        call = self._gradient_calls.get((problem, arch))
        if call is None:
            kernels = choose_gradient_kernels(problem, arch, limits)
            assert kernels is not None, "why_not refuses such a problem"
            launcher = functools.partial(self._launcher, problem=problem)
            call = self._gradient_calls[problem, arch] = ChunkedGradients(problem, arch, kernels, launcher)
        return call(inputs, grads)

    # The emulator of the tests replaces these methods.

    def _why_not_device(self, problem: LinearProblem) -> str | None:
        return device.why_not(problem.device)

    def _limits(self, problem: LinearProblem) -> Limits:
        return module.device_limits(device.index_of(problem.device))

    def _launcher(self, launch: KernelLaunch, problem: LinearProblem) -> Callable[[Params], None]:
        return device.launcher(launch, problem.device)


def _arch(limits: Limits) -> int:
    """The code path in use on a GPU."""
    return environment.cuda_arch() or limits.arch
