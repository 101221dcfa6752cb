"""The cuda backend of linear attention on tensors of the processor, and calls with NaN around their tensors."""

from __future__ import annotations

import ctypes
import math

from emulated_backend import OneChip
from emulator import Range

from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.linear.backend import CudaLinearBackend
from fastattention.backends.cuda.linear.params import StepParams
from fastattention.linear.problem import LinearInputs, LinearProblem
from fastattention.testing.memory import guarded


class EmulatedLinear(OneChip, CudaLinearBackend):
    """The backend as if on one chip. Token by token, kernels depend only on its number of multiprocessors."""

    def ranges_of(self, params: Params, problem: LinearProblem) -> list[Range]:
        """The memory that a launch may access in vectors. Memory that it must write becomes NaN."""
        assert isinstance(params, StepParams)
        item = problem.dtype.itemsize
        num_states = problem.num_sequences * problem.nheads
        results = [
            Range(params.out or 0, item * math.prod(problem.out_shape)),
            Range(params.final_state or 0, 4 * math.prod(problem.state_shape) if params.final_state else 0),
        ]
        for result in results:
            if result.bytes:
                ctypes.memset(result.address, 0xFF, result.bytes)
        tokens = problem.batch_size - 1, problem.seqlen - 1
        heads, heads_k = problem.nheads - 1, problem.nheads_k - 1
        reads = [
            (params.q, "q", (*tokens, heads_k), problem.headdim_k, item),
            (params.k, "k", (*tokens, heads_k), problem.headdim_k, item),
            (params.v, "v", (*tokens, heads), problem.headdim_v, item),
        ]
        ranges = results + [_range(params, *read) for read in reads if problem.batch_size and problem.seqlen]
        if params.initial_state and num_states:
            last = (problem.num_sequences - 1) * params.initial_stride_sequence + heads * params.initial_stride_head
            last += (problem.headdim_k - 1) * params.initial_stride_row + problem.headdim_v
            ranges.append(Range(params.initial_state, 4 * last))
        return [part for part in ranges if part.bytes]


def _range(params: Params, address: int, name: str, lasts: tuple[int, ...], columns: int, item: int) -> Range:
    strides = (getattr(params, f"{name}_stride_{axis}") for axis in ("batch", "token", "head"))
    last = sum(last * stride for last, stride in zip(lasts, strides, strict=True))
    return Range(address, item * (last + columns))


def guarded_inputs(inputs: LinearInputs, offset: int = 0) -> LinearInputs:
    """`guarded` for all tensors of a call that hold floats."""
    floats = {
        name: guarded(x, offset) for name, x in inputs._asdict().items() if x is not None and x.is_floating_point()
    }
    return inputs._replace(**floats)
