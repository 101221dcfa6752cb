"""CpuLinearCall: a call of the native library, set up once for all calls whose tensors have the same strides."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import torch
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import (
    contiguous_strides,
    first_strides,
    named_strides,
    pointers,
    token_strides,
)
from fastattention.backends.cpu.headers import DTYPE_CODES, STRUCTS, pointer_packer
from fastattention.backends.cpu.library import load_library
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearOutput, LinearProblem
from fastattention.threads import get_num_threads

CpuLinearParams = STRUCTS["FaLinearParams"]
GradientParams = STRUCTS["FaLinearGradients"]
_MOST_PARTS = 8  # of the heads that share a key head: each sums its gradients of queries and keys


class CpuLinearCall:
    """Linear attention of tensors with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(self, problem: LinearProblem, inputs: LinearInputs) -> None:
        self._params = linear_params(
            problem, inputs, chunk_of(problem.dtype, load_library().isa) if problem.chunked else 0
        )
        self._params_at = ctypes.addressof(self._params)
        self._pack = pointer_packer(CpuLinearParams, "out", "final_state", *LinearInputs._fields)
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._state = (problem.state_shape, contiguous_strides(problem.state_shape)) if problem.returns_state else None

    def __call__(self, inputs: LinearInputs) -> LinearOutput:
        """One call of the native library."""
        q = inputs.q
        out = q.new_empty_strided(*self._out)
        state = None if self._state is None else q.new_empty_strided(*self._state, dtype=torch.float32)
        addresses = self._pack(*pointers(out, state, *inputs))
        if load_library().linear(self._params_at, addresses, get_num_threads()) != 0:
            raise MemoryError("fastattention could not get working memory for linear attention")
        return LinearOutput(out, state)


def linear_gradients(problem: LinearProblem, inputs: LinearInputs, grads: LinearGradients) -> Mapping[str, Tensor]:
    """Gradients of the tensors in `problem.grads`, in one call of the native library, in chunks."""
    params = linear_params(problem, inputs, chunk_of(problem.dtype, load_library().isa))
    heads_of_part = -(-problem.group_size // _MOST_PARTS)
    num_parts = -(-problem.group_size // heads_of_part)

    def floats(*shape: int) -> Tensor:
        return inputs.q.new_empty(shape, dtype=torch.float32)

    sums = {}  # over heads that share a key head, and over sequences
    if problem.group_size > 1:
        sums = {name: floats(num_parts, *inputs.q.shape) for name in "qk"}
    if inputs.skip is not None:
        sums["skip"] = floats(problem.num_sequences, problem.nheads)
    found = sums | {
        "v": inputs.v.new_empty(problem.out_shape),
        "g": floats(*inputs.g.shape),
    }
    if inputs.beta is not None:
        found["beta"] = floats(*inputs.beta.shape)
    if inputs.initial_state is not None:
        found["initial_state"] = floats(*problem.state_shape)
    if problem.group_size == 1:
        found |= {name: inputs.q.new_empty(inputs.q.shape) for name in "qk"}
    addresses = pointer_packer(CpuLinearParams, *LinearInputs._fields)(*pointers(*inputs))
    dout, dfinal_state = pointers(*grads)
    filled = dict(zip([f"d{name}" for name in found], pointers(*found.values()), strict=True))
    gradients = GradientParams.make(
        GradientParams.template(num_parts=num_parts), dout=dout, dfinal_state=dfinal_state, **filled
    )
    if load_library().linear_backward(
        ctypes.addressof(params), addresses, ctypes.addressof(gradients), get_num_threads()
    ):
        raise MemoryError("fastattention could not get working memory for gradients of linear attention")
    found |= {name: tensor.sum(0) for name, tensor in sums.items()}
    return {name: found[name].to(getattr(inputs, name).dtype) for name in problem.grads}


def linear_params(problem: LinearProblem, inputs: LinearInputs, chunk: int) -> Params:
    """The arguments of calls with tensors of these strides, without addresses and the number of threads.

    chunk: tokens of a chunk; 0: token by token
    """
    template = CpuLinearParams.template(
        dtype=DTYPE_CODES[problem.dtype],
        gate_dtype=DTYPE_CODES[problem.gate_dtype],
        beta_dtype=DTYPE_CODES[problem.beta_dtype or torch.float32],
        seqlen=problem.seqlen,
        num_sequences=problem.num_sequences,
        nheads=problem.nheads,
        nheads_k=problem.nheads_k,
        headdim_k=problem.headdim_k,
        headdim_v=problem.headdim_v,
        gate_per_key=problem.gate_per_key,
        overwrites=problem.delta_rule,
        l2norm=problem.l2norm,
        chunk=chunk,
        num_threads=0,
        scale=problem.scale,
        **named_strides("q", token_strides(inputs.q)),
        **named_strides("k", token_strides(inputs.k)),
        **named_strides("v", token_strides(inputs.v)),
        **named_strides("g", first_strides(inputs.g)),
        **named_strides("beta", first_strides(inputs.beta)),
        **named_strides("state", first_strides(inputs.initial_state), "sequence head row"),
    )
    return CpuLinearParams.from_buffer_copy(template)


def chunk_of(dtype: torch.dtype, isa: str) -> int:
    """Tokens of a chunk: a multiple of six rows and of whole vectors, or of AMX tiles.

    Twice as many tokens take 12% more operations per token. Half as many read and write the state twice as often.
    """
    return 64 if dtype is torch.bfloat16 and isa == "amx_bf16" else 48
