"""The cpu backend: hands a validated call to the native library."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.backends.base import Backend
from fastattention.backends.common.layout import bias_strides, pointer, scale_strides, token_strides
from fastattention.backends.cpu.library import AttentionParams, load_library
from fastattention.backends.cpu.prepared import PreparedCall
from fastattention.errors import LibraryError
from fastattention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.threads import get_num_threads

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


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
        load_library().forward(_params(problem, inputs, out, lse, get_num_threads()))
        return AttentionOutput(out, lse)

    def prepare(self, problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor, num_threads: int) -> PreparedCall:
        """One call of the native library with a cache, to be run later: lengths and pages are those of now.

        out, lse: contiguous, as `forward` gives them; num_threads: at most, the thread that runs it included
        """
        return PreparedCall(_params(problem, inputs, out, lse, num_threads), (inputs, out, lse))


def _params(problem: Problem, inputs: Inputs, out: Tensor, lse: Tensor | None, num_threads: int) -> AttentionParams:
    """The fields of params.h in its order."""
    packed = problem.layout is Layout.PACKED
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    lse_stride_head = problem.total_q if packed else problem.seqlen_q
    return AttentionParams(
        inputs.q.data_ptr(),
        inputs.k.data_ptr(),
        inputs.v.data_ptr(),
        out.data_ptr(),
        pointer(lse),
        pointer(inputs.k_new),
        pointer(inputs.v_new),
        pointer(inputs.rotary_cos),
        pointer(inputs.rotary_sin),
        pointer(inputs.cu_seqlens_q),
        pointer(inputs.cu_seqlens_k),
        pointer(inputs.cache_seqlens),
        pointer(inputs.cache_batch_idx),
        pointer(inputs.cache_leftpad),
        pointer(table),
        pointer(alibi),
        pointer(inputs.sinks),
        pointer(bias),
        pointer(inputs.k_scale),
        pointer(inputs.v_scale),
        _DTYPE_CODES[problem.dtype],
        _DTYPE_CODES[problem.cache_dtype or problem.dtype],
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
        problem.panel_size,
        *token_strides(inputs.q),
        *_cache_strides(problem, inputs.k),
        *_cache_strides(problem, inputs.v),
        *token_strides(out),
        0 if packed else problem.nheads * lse_stride_head,
        lse_stride_head,
        *token_strides(inputs.k_new),
        *token_strides(inputs.v_new),
        *scale_strides(inputs.k_scale),
        *scale_strides(inputs.v_scale),
        0 if table is None else table.stride(0),
        0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        *bias_strides(bias),
        problem.window_left,
        problem.window_right,
        problem.rotary_dim,
        problem.rotary_interleaved,
        problem.num_splits,
        num_threads,
        problem.softmax_scale,
        problem.softcap,
    )


def _cache_strides(problem: Problem, cache: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of k or v; the rows of a packed cache have none."""
    return (cache.stride(0), 0, cache.stride(1)) if problem.panel_size else token_strides(cache)
