"""The cuda backend of the causal convolution on tensors of the processor."""

from __future__ import annotations

import math

from emulated_backend import OneChip
from emulator import Range

from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.convolution.backend import CudaConvolutionBackend
from fastattention.backends.cuda.convolution.params import ConvolutionBackwardParams
from fastattention.convolution.problem import ConvolutionProblem


class EmulatedConvolution(OneChip, CudaConvolutionBackend):
    """The backend as if on one chip. There is one code path, which depends only on the number of multiprocessors."""

    def ranges_of(self, params: Params, problem: ConvolutionProblem) -> list[Range]:
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
