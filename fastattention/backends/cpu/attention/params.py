"""The arguments of a call of attention, which kernels/attention/params.h declares."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.dropout import threshold
from fastattention.backends.common.layout import first_strides, named_strides, score_strides, token_strides
from fastattention.backends.cpu.headers import DTYPE_CODES, STRUCTS

CpuAttentionParams = STRUCTS["FaAttentionParams"]
Gradients = STRUCTS["FaGradients"]


def gradient_params(grad_out: Tensor, grad_lse: Tensor | None, found: Mapping[str, Tensor]) -> Params:
    """The tensors of a backward, all contiguous. found: the gradients to fill, by name."""
    wanted = {f"grad_{name}": tensor.data_ptr() for name, tensor in found.items()}
    lse = 0 if grad_lse is None else grad_lse.data_ptr()
    return Gradients.make(Gradients.template(), grad_out=grad_out.data_ptr(), grad_lse=lse, **wanted)


def attention_params(problem: Problem, inputs: Inputs) -> Params:
    """The arguments of calls with tensors of these strides, without addresses and the number of threads."""
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    block_m, block_n = problem.block_size or (0, 0)
    template = CpuAttentionParams.template(
        dtype=DTYPE_CODES[problem.dtype],
        cache_dtype=DTYPE_CODES[problem.cache_dtype or problem.dtype],
        bias_dtype=0 if bias is None else DTYPE_CODES[bias.dtype],
        qk_dtype=DTYPE_CODES[problem.qk_dtype or problem.dtype],
        batch_size=problem.batch_size,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        seqlen_new=problem.seqlen_new,
        nheads=problem.nheads,
        nheads_k=problem.nheads_k,
        headdim=problem.headdim,
        headdim_v=problem.headdim_v,
        page_block_size=problem.page_block_size or 0,
        panel_size=problem.panel_size,
        block_table_stride=0 if table is None else table.stride(0),
        alibi_stride_batch=0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        block_m=block_m,
        block_n=block_n,
        window_left=problem.window_left,
        window_right=problem.window_right,
        rotary_dim=problem.rotary_dim,
        rotary_interleaved=problem.rotary_interleaved,
        num_splits=problem.num_splits,
        num_threads=0,
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        dropout_p=problem.dropout_p,
        dropout_threshold=threshold(problem.dropout_p),
        **_result_strides(problem),
        **_input_strides(problem, inputs),
    )
    return CpuAttentionParams.from_buffer_copy(template)


def _result_strides(problem: Problem) -> dict[str, int]:
    """Strides of out and lse, which are contiguous. Varlen calls have no batch stride, but cu_seqlens_q."""
    varlen = problem.layout is Layout.VARLEN
    out_row = problem.nheads * problem.headdim_v
    lse_head = problem.total_q if varlen else problem.seqlen_q
    return {
        **named_strides("out", (0 if varlen else problem.seqlen_q * out_row, out_row, problem.headdim_v)),
        **named_strides("lse", (0 if varlen else problem.nheads * lse_head, lse_head), "batch head"),
    }


def _input_strides(problem: Problem, inputs: Inputs) -> dict[str, int]:
    return {
        **named_strides("q", token_strides(inputs.q)),
        **named_strides("k", _cache_strides(problem, inputs.k)),
        **named_strides("v", _cache_strides(problem, inputs.v)),
        **named_strides("k_new", token_strides(inputs.k_new)),
        **named_strides("v_new", token_strides(inputs.v_new)),
        **named_strides("k_scale", first_strides(inputs.k_scale)),
        **named_strides("v_scale", first_strides(inputs.v_scale)),
        **named_strides("bias", score_strides(inputs.attn_bias), "batch head row key"),
        **named_strides("block", score_strides(inputs.block_mask), "batch head row key"),
        **named_strides("tile", score_strides(inputs.tile_index), "batch head row key"),
    }


def _cache_strides(problem: Problem, cache: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of k or v; the rows of a cache in panels have none."""
    return (cache.stride(0), 0, cache.stride(1)) if problem.panel_size else token_strides(cache)
