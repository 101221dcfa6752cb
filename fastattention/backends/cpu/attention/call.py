"""CpuAttentionCall: a call of the native library, set up once for all calls whose tensors have the same strides."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, OutputGradients, Problem
from fastattention.backends.common.addresses import Addresses
from fastattention.backends.common.layout import contiguous_strides
from fastattention.backends.cpu.attention.params import CpuAttentionParams, attention_params, gradient_params
from fastattention.backends.cpu.attention.prepared import PreparedCall
from fastattention.backends.cpu.headers import pointer_packer
from fastattention.backends.cpu.library import load_library
from fastattention.threads import get_num_threads


class CpuAttentionCall:
    """Attention to tensors with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(self, problem: Problem, inputs: Inputs) -> None:
        self._params = attention_params(problem, inputs)
        self._params_at = ctypes.addressof(self._params)
        addresses = Addresses(CpuAttentionParams, inputs)
        self._addresses_of = addresses.of
        self._pointers = "out", "lse", *addresses.given
        self._pack = pointer_packer(CpuAttentionParams, *self._pointers)
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._lse = (problem.lse_shape, contiguous_strides(problem.lse_shape)) if problem.keeps_lse else None

    def __call__(self, inputs: Inputs) -> AttentionOutput:
        """One call of the native library, appending included."""
        q = inputs.q
        out = q.new_empty_strided(*self._out)  # takes half the time of torch.empty
        lse = None if self._lse is None else q.new_empty_strided(*self._lse, dtype=torch.float32)
        results = out.data_ptr(), 0 if lse is None else lse.data_ptr()
        addresses = self._pack(*results, *self._addresses_of(inputs))
        if load_library().forward(self._params_at, addresses, get_num_threads()) != 0:
            raise MemoryError("fastattention could not get memory for its packed keys and values")
        return AttentionOutput(out, lse)

    def backward(
        self, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
    ) -> dict[str, Tensor]:
        """Gradients of the tensors in `problem.grads`, in one call of the native library."""
        assert result.lse is not None
        grad_out = result.out.new_zeros(result.out.shape) if grads.out is None else grads.out
        found = {
            name: torch.empty_like(getattr(inputs, name), memory_format=torch.contiguous_format)
            for name in problem.grads
        }
        addresses = self._pack(result.out.data_ptr(), result.lse.data_ptr(), *self._addresses_of(inputs))
        gradients = gradient_params(grad_out, grads.lse, found)
        library = load_library()
        if library.backward(self._params_at, addresses, ctypes.addressof(gradients), get_num_threads()) != 0:
            raise MemoryError("fastattention could not get memory for its packed queries and gradients")
        return found

    def prepare(self, inputs: Inputs, out: Tensor, lse: Tensor, num_threads: int) -> PreparedCall:
        """One call of the native library with a cache, to be run later, with the lengths and pages of now.

        out, lse: contiguous, as a call gives them; num_threads: at most, the thread that runs it included
        """
        make = CpuAttentionParams.maker(*self._pointers)
        params = make(bytes(self._params), out.data_ptr(), lse.data_ptr(), *self._addresses_of(inputs))
        params.num_threads = num_threads
        return PreparedCall(params, (inputs, out, lse))
