"""The cpu backend of linear attention: the native library, kernels/linear*.hpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from fastattention.backends.common.gradients import why_not_in_transform
from fastattention.backends.common.layout import contiguous_strides, first_strides, pointers, token_strides
from fastattention.backends.common.params import Params, fields, formats
from fastattention.backends.cpu.library import load_library, why_unavailable
from fastattention.backends.cpu.params import DTYPE_CODES
from fastattention.linear.backend import LinearBackend
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.threads import get_num_threads


def chunk_of(dtype: torch.dtype, isa: str) -> int:
    """Tokens of a chunk.

    Whole register tiles of six rows and whole vectors, or of AMX tiles. Twice as many take 12% more operations a token;
    with half of them the state is read and written twice as often.
    """
    return 64 if dtype is torch.bfloat16 and isa == "amx_bf16" else 48


class LinearParams(Params):
    """FaLinearParams of kernels/params.h."""

    _fields_ = fields(
        Q="out final_state q k v g beta initial_state cu_seqlens",
        q="""dtype gate_dtype beta_dtype seqlen num_sequences nheads nheads_k headdim_k headdim_v
        q_stride_batch q_stride_row q_stride_head k_stride_batch k_stride_row k_stride_head
        v_stride_batch v_stride_row v_stride_head g_stride_batch g_stride_row g_stride_head
        beta_stride_batch beta_stride_row beta_stride_head
        state_stride_sequence state_stride_head state_stride_row gate_per_key l2norm chunk num_threads""",
        d="scale",
    )
    _pointers, _rest = formats(_fields_)


class CpuLinearBackend(LinearBackend):
    """Computes in float32. Products of bfloat16 are those of its instructions, where there are such."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        return why_unavailable()

    def why_not(self, problem: LinearProblem) -> str | None:
        """Other devices, and gradients."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors in host memory"
        if problem.grads:
            named = ", ".join(problem.grads)
            return f"gradients of {named} are needed, which backend 'torch' computes; use it or torch.no_grad()"
        if problem.in_transform:
            return why_not_in_transform("torch")
        return None

    def how(self, problem: LinearProblem) -> str:
        """The instruction set, and how many tokens go together."""
        isa = load_library().isa
        return f"{f'chunks of {chunk_of(problem.dtype, isa)} tokens' if problem.chunked else 'token by token'}, {isa}"

    def plan(self, problem: LinearProblem, inputs: LinearInputs) -> Callable[[LinearInputs], LinearOutput]:
        """A call of the library whose parameters are set up once."""
        return LinearCall(problem, inputs)


class LinearCall:
    """Linear attention of tensors with the strides of `inputs`. Any number of threads may call it at a time."""

    def __init__(self, problem: LinearProblem, inputs: LinearInputs) -> None:
        self._params = linear_params(problem, inputs)
        self._params_at = ctypes.addressof(self._params)
        self._out = problem.out_shape, contiguous_strides(problem.out_shape)
        self._state = (problem.state_shape, contiguous_strides(problem.state_shape)) if problem.returns_state else None

    def __call__(self, inputs: LinearInputs) -> LinearOutput:
        """One call of the native library."""
        q = inputs.q
        out = q.new_empty_strided(*self._out)
        state = None if self._state is None else q.new_empty_strided(*self._state, dtype=torch.float32)
        addresses = LinearParams._pointers.pack(*pointers(out, state, *inputs))
        if load_library().linear(self._params_at, addresses, get_num_threads()) != 0:
            raise MemoryError("fastattention could not get working memory for linear attention")
        return LinearOutput(out, state)


def linear_params(problem: LinearProblem, inputs: LinearInputs) -> LinearParams:
    """What calls with tensors of these strides have in common: all but addresses and the number of threads."""
    codes = DTYPE_CODES
    # fmt: off
    template = LinearParams.template(
        codes[problem.dtype], codes[problem.gate_dtype], codes[problem.beta_dtype or torch.float32],
        problem.seqlen, problem.num_sequences,
        problem.nheads, problem.nheads_k, problem.headdim_k, problem.headdim_v,
        *token_strides(inputs.q), *token_strides(inputs.k), *token_strides(inputs.v),
        *first_strides(inputs.g), *first_strides(inputs.beta), *first_strides(inputs.initial_state),
        problem.gate_per_key, problem.l2norm,
        chunk_of(problem.dtype, load_library().isa) if problem.chunked else 0, 0,
        problem.scale,
    )
    # fmt: on
    return LinearParams.from_buffer_copy(template)
