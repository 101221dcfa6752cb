"""The arguments of a call of the native library, field by field as in kernels/params.h."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.backends.common.layout import first_strides, score_strides, token_strides
from fastattention.backends.common.params import Params, fields, formats

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}


class AttentionParams(Params):
    """FaAttentionParams."""

    _fields_ = fields(
        Q="""out lse q k v k_new v_new rotary_cos rotary_sin cu_seqlens_q cu_seqlens_k cache_seqlens cache_batch_idx
        cache_leftpad block_table alibi_slopes sinks dropout_seed attn_bias block_mask k_scale v_scale""",
        q="""dtype cache_dtype bias_dtype qk_dtype batch_size seqlen_q seqlen_k seqlen_new nheads nheads_k
        headdim headdim_v page_block_size panel_size
        q_stride_batch q_stride_row q_stride_head k_stride_batch k_stride_row k_stride_head
        v_stride_batch v_stride_row v_stride_head out_stride_batch out_stride_row out_stride_head
        lse_stride_batch lse_stride_head
        k_new_stride_batch k_new_stride_row k_new_stride_head v_new_stride_batch v_new_stride_row v_new_stride_head
        k_scale_stride_batch k_scale_stride_row k_scale_stride_head
        v_scale_stride_batch v_scale_stride_row v_scale_stride_head
        block_table_stride alibi_stride_batch bias_stride_batch bias_stride_head bias_stride_row bias_stride_key
        block_stride_batch block_stride_head block_stride_row block_stride_key block_m block_n
        window_left window_right rotary_dim rotary_interleaved num_splits num_threads""",
        d="softmax_scale softcap dropout_p",
    )
    _pointers, _rest = formats(_fields_)


class GradientParams(Params):
    """FaGradients."""

    _fields_ = fields(Q="grad_out grad_lse grad_q grad_k grad_v grad_sinks")


def gradient_params(grad_out: Tensor, grad_lse: Tensor | None, found: Mapping[str, Tensor]) -> GradientParams:
    """The tensors of a backward, all contiguous. found: by name, those that are to be filled."""
    addresses = [found[name].data_ptr() if name in found else 0 for name in ("q", "k", "v", "sinks")]
    return GradientParams(grad_out.data_ptr(), 0 if grad_lse is None else grad_lse.data_ptr(), *addresses)


def attention_params(problem: Problem, inputs: Inputs) -> AttentionParams:
    """What calls with tensors of these strides have in common: all but addresses and the number of threads."""
    varlen = problem.layout is Layout.VARLEN
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    out_row = problem.nheads * problem.headdim_v
    lse_head = problem.total_q if varlen else problem.seqlen_q
    # fmt: off
    template = AttentionParams.template(
        DTYPE_CODES[problem.dtype], DTYPE_CODES[problem.cache_dtype or problem.dtype],
        0 if bias is None else DTYPE_CODES[bias.dtype], DTYPE_CODES[problem.qk_dtype or problem.dtype],
        problem.batch_size, problem.seqlen_q, problem.seqlen_k, problem.seqlen_new,
        problem.nheads, problem.nheads_k, problem.headdim, problem.headdim_v,
        problem.page_block_size or 0, problem.panel_size,
        *token_strides(inputs.q), *_cache_strides(problem, inputs.k), *_cache_strides(problem, inputs.v),
        0 if varlen else problem.seqlen_q * out_row, out_row, problem.headdim_v,
        0 if varlen else problem.nheads * lse_head, lse_head,
        *token_strides(inputs.k_new), *token_strides(inputs.v_new),
        *first_strides(inputs.k_scale), *first_strides(inputs.v_scale),
        0 if table is None else table.stride(0), 0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        *score_strides(bias),
        *score_strides(inputs.block_mask), *(problem.block_size or (0, 0)),
        problem.window_left, problem.window_right, problem.rotary_dim, problem.rotary_interleaved,
        problem.num_splits, 0,
        problem.softmax_scale, problem.softcap, problem.dropout_p,
    )
    # fmt: on
    return AttentionParams.from_buffer_copy(template)


def _cache_strides(problem: Problem, cache: Tensor) -> tuple[int, int, int]:
    """(batch, row, head) strides of k or v; the rows of a cache in panels have none."""
    return (cache.stride(0), 0, cache.stride(1)) if problem.panel_size else token_strides(cache)
