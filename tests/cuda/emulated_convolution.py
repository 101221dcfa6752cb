"""The cuda backend of the causal convolution on tensors of the processor."""

from __future__ import annotations

import math
from collections.abc import Callable

from emulator import Range, Report, launch

from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.convolution.backend import CudaConvolutionBackend
from fastattention.backends.cuda.convolution.params import ConvolutionBackwardParams
from fastattention.convolution.problem import ConvolutionProblem
from fastattention.gpu_runtime.chips import CHIPS, Limits
from fastattention.gpu_runtime.module import KernelLaunch


class EmulatedConvolution(CudaConvolutionBackend):
    """The backend as if on one chip. There is one code path, which depends only on the number of multiprocessors."""

    def __init__(self, num_sms: int) -> None:
        self.limits = CHIPS["A100"]._replace(num_sms=num_sms)
        self.launches: list[KernelLaunch] = []
        self.reports: list[Report] = []

    def why_unavailable(self) -> str | None:
        return None

    def _why_not_device(self, problem: ConvolutionProblem) -> str | None:
        return None if problem.device.type == "cpu" else f"tensors are on {problem.device}; the emulator takes cpu"

    def _limits(self, problem: ConvolutionProblem) -> Limits:
        return self.limits

    def _launcher(self, step: KernelLaunch, problem: ConvolutionProblem) -> Callable[[Params], None]:
        def emulate(params: Params) -> None:
            self.launches.append(step)
            self.reports.append(launch(step, params, ranges_of(params, problem)))

        return emulate


def ranges_of(params: Params, problem: ConvolutionProblem) -> list[Range]:
    """The memory that a launch may access in vectors: x, tensors like it, and sums of the backward."""
    item, size = problem.dtype.itemsize, problem.dtype.itemsize * math.prod(problem.out_shape)
    is_backward = isinstance(params, ConvolutionBackwardParams)
    call = params.call if is_backward else params
    ranges = []
    if size:
        last = (problem.batch_size - 1) * call.x_stride_batch + (problem.seqlen - 1) * call.x_stride_token
        ranges.append(Range(call.x, item * (last + problem.channels)))
    for address in (params.grad_out, params.grad_x) if is_backward else (params.out,):
        ranges.append(Range(address or 0, size if address else 0))
    if is_backward:
        ranges.append(Range(params.sums, 4 * params.num_ranges * (problem.width + 1) * problem.channels))
    return [part for part in ranges if part.bytes]
