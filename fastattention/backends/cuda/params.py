"""The arguments of the kernels, field by field as in kernels/params.h."""

from __future__ import annotations

from typing import ClassVar

from fastattention.backends.common.params import Params, fields, formats

MOST_PARTS = 8  # of a launch; kernels/params.h says the same

_LENGTHS = {"parts": MOST_PARTS}


class AttentionParams(Params):
    """Of forward.cuh, decode.cuh and combine.cuh."""

    _fields_ = fields(
        Q="""q k v out lse cu_seqlens_q cu_seqlens_k cache_seqlens cache_batch_idx cache_leftpad block_table
        alibi_slopes sinks attn_bias dropout_seed block_mask k_scale v_scale q_scale q_shift
        partial_out partial_stats counters""",
        q="""q_stride_batch q_stride_head k_stride_batch k_stride_head v_stride_batch v_stride_head
        k_scale_stride_batch k_scale_stride_row k_scale_stride_head
        v_scale_stride_batch v_scale_stride_row v_scale_stride_head
        out_stride_batch out_stride_head lse_stride_batch lse_stride_head
        bias_stride_batch bias_stride_head bias_stride_row bias_stride_key alibi_stride_batch block_table_stride
        block_stride_batch block_stride_head block_stride_row block_stride_key""",
        i="""q_stride_row k_stride_row v_stride_row out_stride_row batch_size seqlen_q seqlen_k seqlen_new
        max_cache_seqlen nheads group_size group_multiplier group_shift headdim headdim_v
        page_block_size page_multiplier page_shift window_left window_right block_m block_n bias_is_float
        num_m_tiles heads_per_l2_wave num_units units_multiplier units_shift
        num_cta_groups cta_groups_multiplier cta_groups_shift num_splits partial_rows teams_of_row dropout_threshold""",
        f="softmax_scale softcap dropout_factor",
    )
    _pointers, _rest = formats(_fields_)


class BackwardParams(Params):
    """Of delta.cuh and backward.cuh: filled field by field, for it holds the parameters of the forward."""

    _fields_: ClassVar = [
        ("call", AttentionParams),
        *fields(
            Q="grad_out grad_lse stats grad_q grad_k grad_v",
            q="num_rows",
            f="exponents_of_lse",
        ),
    ]


class QuantizeParams(Params):
    """Of quantize_rows.cuh."""

    _fields_ = fields(
        Q="q k cu_seqlens_q cu_seqlens_k sums q_stored k_stored q_scale q_shift k_scale",
        q="q_stride_batch q_stride_row q_stride_head k_stride_batch k_stride_row k_stride_head",
        i="""batch_size seqlen_q seqlen_k total_q nheads nheads_k headdim columns num_chunks
        q_tiles k_tiles""",
    )
    _pointers, _rest = formats(_fields_)


class AppendParams(Params):
    """Of append.cuh."""

    _fields_ = fields(
        Q="""k_new v_new k v k_scale v_scale q q_rotated rotary_cos rotary_sin
        cache_seqlens cache_batch_idx cache_leftpad block_table""",
        q="""k_new_stride_batch k_new_stride_row k_new_stride_head v_new_stride_batch v_new_stride_row v_new_stride_head
        k_stride_batch k_stride_row k_stride_head v_stride_batch v_stride_row v_stride_head
        k_scale_stride_batch k_scale_stride_row k_scale_stride_head
        v_scale_stride_batch v_scale_stride_row v_scale_stride_head
        q_stride_batch q_stride_row q_stride_head block_table_stride""",
        i="""batch_size seqlen_q seqlen_new nheads nheads_k headdim headdim_v page_block_size max_cache_seqlen
        rotary_dim rotary_interleaved rotates_by_token""",
    )
    _pointers, _rest = formats(_fields_)


class MergeParams(Params):
    """Of merge.cuh."""

    _fields_ = fields(
        _LENGTHS,
        Q="outs[parts] lses[parts] out lse",
        q="""outs_stride_batch[parts] outs_stride_row[parts] outs_stride_head[parts]
        lses_stride_batch[parts] lses_stride_head[parts] lses_stride_row[parts]""",
        i="num_parts batch_size tokens nheads headdim_v",
    )
    _pointers, _rest = formats(_fields_)
