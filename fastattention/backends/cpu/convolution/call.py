"""CpuConvolutionCall: a call of the native library, set up once for all calls whose tensors have the same strides."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.convolution import state_strides
from fastattention.backends.common.layout import contiguous_strides, named_strides, pointers
from fastattention.backends.cpu.headers import DTYPE_CODES, STRUCTS, pointer_packer
from fastattention.backends.cpu.library import load_library
from fastattention.convolution.problem import (
    ConvolutionGradients,
    ConvolutionInputs,
    ConvolutionOutput,
    ConvolutionProblem,
)
from fastattention.threads import get_num_threads

CpuConvolutionParams, CpuConvolutionGradients = STRUCTS["FaConvolutionParams"], STRUCTS["FaConvolutionGradients"]


class CpuConvolutionCall:
    """The convolution of tensors with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(self, problem: ConvolutionProblem, inputs: ConvolutionInputs) -> None:
        self._problem = problem
        self._params = convolution_params(problem, inputs)
        self._params_at = ctypes.addressof(self._params)
        self._pack = pointer_packer(CpuConvolutionParams, "out", "final_state", *ConvolutionInputs._fields)
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._state = (problem.state_shape, contiguous_strides(problem.state_shape)) if problem.returns_state else None

    def __call__(self, inputs: ConvolutionInputs) -> ConvolutionOutput:
        """One call of the native library. An update writes the state where it is."""
        out = inputs.x.new_empty_strided(*self._out)
        state = None if self._state is None else inputs.x.new_empty_strided(*self._state)
        written = inputs.initial_state if self._problem.updates else state
        addresses = self._pack(*pointers(out, written, *inputs))
        if load_library().convolution(self._params_at, addresses, get_num_threads()) != 0:
            raise MemoryError("fastattention could not get working memory for a causal convolution")
        return ConvolutionOutput(out, state)

    def backward(self, inputs: ConvolutionInputs, grads: ConvolutionGradients) -> dict[str, Tensor]:
        """Gradients of the tensors in `problem.grads`, in one call of the native library."""
        found = {
            name: torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format)
            for name in self._problem.grads
        }
        grad_out = inputs.x.new_zeros(self._problem.out_shape) if grads.out is None else grads.out
        tensors = {"grad_out": grad_out, "grad_final_state": grads.final_state}
        tensors |= {f"grad_{name}": grad for name, grad in found.items()}
        gradients = CpuConvolutionGradients(**dict(zip(tensors, pointers(*tensors.values()), strict=True)))
        addresses = self._pack(*pointers(None, None, *inputs))
        library = load_library()
        at = ctypes.addressof(gradients)
        if library.convolution_backward(self._params_at, addresses, at, get_num_threads()) != 0:
            raise MemoryError("fastattention could not get working memory for gradients of a causal convolution")
        return found


def convolution_params(problem: ConvolutionProblem, inputs: ConvolutionInputs) -> Params:
    """The arguments of calls with tensors of these strides, without addresses and the number of threads."""
    initial, final = state_strides(problem, inputs)
    template = CpuConvolutionParams.template(
        dtype=DTYPE_CODES[problem.dtype],
        weight_dtype=DTYPE_CODES[problem.weight_dtype],
        bias_dtype=DTYPE_CODES[problem.bias_dtype or torch.float32],
        state_dtype=DTYPE_CODES[problem.state_dtype],
        seqlen=problem.seqlen,
        num_sequences=problem.num_sequences,
        channels=problem.channels,
        width=problem.width,
        state_len=problem.state_len,
        **named_strides("x", inputs.x.stride()[:2], "batch row"),
        **named_strides("initial", initial, "sequence channel input"),
        **named_strides("final", final, "sequence channel input"),
        silu=problem.silu,
        updates=problem.updates,
        num_threads=0,
    )
    return CpuConvolutionParams.from_buffer_copy(template)
