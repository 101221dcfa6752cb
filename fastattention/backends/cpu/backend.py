"""The cpu backend: hands a validated call to the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.backends.base import Backend
from fastattention.backends.cpu.library import AttentionParams, load_library
from fastattention.errors import LibraryError
from fastattention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.threads import get_num_threads

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CpuBackend(Backend):
    """Native kernels for any CPU, the instruction set chosen at run time."""

    name = "cpu"

    def why_unavailable(self) -> str | None:
        """Why the native library cannot be loaded, if so."""
        try:
            load_library()
        except LibraryError as error:
            return str(error)
        return None

    def why_not(self, problem: Problem) -> str | None:
        """Refuses other devices, gradients and dropout; serves everything else."""
        if problem.device.type != "cpu":
            return f"tensors are on {problem.device}; the cpu backend takes tensors on cpu"
        if problem.needs_grad:
            return "a gradient is needed and this backend has no backward; use backend='sdpa' or torch.no_grad()"
        if problem.dropout_p > 0.0:
            return f"dropout_p={problem.dropout_p} is not served; use dropout_p=0.0 or backend='sdpa'"
        return None

    def describe(self) -> str:
        """Instruction set in use, those to choose from, and threads."""
        library = load_library()
        return f"{library.isa} of {', '.join(library.isas)}; {get_num_threads()} threads"

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """One call of the native library, appending included."""
        out = torch.empty(problem.out_shape, dtype=problem.dtype)
        lse = torch.empty(problem.lse_shape, dtype=torch.float32) if problem.return_lse else None
        load_library().forward(_params(problem, inputs, out, lse))
        return AttentionOutput(out, lse)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """(batch, row, head) strides in elements of (batch, row, head, headdim) or packed (row, head, headdim)."""
    if tensor is None:
        return 0, 0, 0
    strides = tensor.stride()
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


def _params(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None) -> AttentionParams:
    """The fields of params.h in its order."""
    packed = problem.layout is Layout.PACKED
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    bias_strides = (0, 0, 0, 0)
    if bias is not None:
        b = bias.stride()
        bias_strides = (0, b[0], b[1], b[2]) if packed else (b[0], b[1], b[2], b[3])
    lse_stride_head = problem.total_q if packed else problem.seqlen_q
    return AttentionParams(
        inputs.q.data_ptr(),
        inputs.k.data_ptr(),
        inputs.v.data_ptr(),
        out.data_ptr(),
        _pointer(lse),
        _pointer(inputs.k_new),
        _pointer(inputs.v_new),
        _pointer(inputs.rotary_cos),
        _pointer(inputs.rotary_sin),
        _pointer(inputs.cu_seqlens_q),
        _pointer(inputs.cu_seqlens_k),
        _pointer(inputs.cache_seqlens),
        _pointer(inputs.cache_batch_idx),
        _pointer(inputs.cache_leftpad),
        _pointer(table),
        _pointer(alibi),
        _pointer(inputs.sinks),
        _pointer(bias),
        _DTYPE_CODES[problem.dtype],
        0 if bias is None else _DTYPE_CODES[bias.dtype],
        problem.batch_size,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.seqlen_new,
        problem.nheads,
        problem.nheads_k,
        problem.headdim,
        problem.headdim_v,
        problem.page_block_size or 0,
        *_strides(inputs.q),
        *_strides(inputs.k),
        *_strides(inputs.v),
        *_strides(out),
        0 if packed else problem.nheads * lse_stride_head,
        lse_stride_head,
        *_strides(inputs.k_new),
        *_strides(inputs.v_new),
        0 if table is None else table.stride(0),
        0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        *bias_strides,
        problem.window_left,
        problem.window_right,
        problem.rotary_dim,
        problem.rotary_interleaved,
        problem.num_splits,
        get_num_threads(),
        problem.softmax_scale,
        problem.softcap,
    )
