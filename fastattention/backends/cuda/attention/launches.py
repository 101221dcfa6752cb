"""The kernels and grids of a problem, and the parameters that its calls share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.dropout import threshold
from fastattention.backends.common.layout import first_strides, named_strides, pointers, score_strides, token_strides
from fastattention.backends.cuda.attention import decode_heuristics, heuristics
from fastattention.backends.cuda.attention.config import (
    CACHE_FORMATS,
    AppendConfig,
    KernelConfig,
)
from fastattention.backends.cuda.attention.decode_heuristics import Split
from fastattention.backends.cuda.attention.params import AppendParams, AttentionParams
from fastattention.backends.cuda.attention.waves import NO_WAVES, Waves, choose_waves
from fastattention.backends.cuda.common.numbers import divisor
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch


@dataclass(frozen=True)
class Launches:
    """The kernels that serve a problem."""

    dtype: torch.dtype  # the dtype in which attention reads and writes
    append: KernelLaunch | None
    attention: tuple[KernelLaunch, ...] = ()  # none when there is nothing to compute
    waves: Waves = NO_WAVES
    split: Split | None = None  # of a decode


def choose_launches(problem: Problem, arch: int, limits: Limits, values_in_keys: bool = False) -> Launches:
    """The launches for a problem on a GPU. Raises CompileError when no kernel fits it.

    values_in_keys: v is the first columns of k, in the same memory.
    """
    append = _append_launch(problem)
    if problem.total_q == 0 or problem.headdim_v == 0:
        return Launches(problem.dtype, append)
    if decode_heuristics.is_decode(problem, limits):
        config = decode_heuristics.choose_decode(problem, arch, limits, values_in_keys)
        split = decode_heuristics.choose_split(problem, config, limits)
        launches = _decode_launches(problem, config, split)
        return Launches(config.dtype, append, launches, Waves(split.num_m_tiles), split)
    config = heuristics.choose_config(problem, arch, limits)
    waves = choose_waves(problem, config, problem.seqlen_q, problem.nheads, problem.seqlen_k, limits)
    launch = KernelLaunch(config, 0, waves.num_m_tiles * problem.nheads * problem.batch_size * config.num_value_parts)
    return Launches(config.dtype, append, (launch,), waves)


def _decode_launches(problem: Problem, config: KernelConfig, split: Split) -> tuple[KernelLaunch, ...]:
    decode = KernelLaunch(config, 0, split.num_ctas * config.num_value_parts)
    if split.num_slots == 0 or split.merges_in_place:
        return (decode,)
    ctas_of_unit = -(-split.partial_rows * split.teams_of_row // config.combine_teams)
    return decode, KernelLaunch(config, 1, problem.batch_size * split.num_units * ctas_of_unit)


def _append_launch(problem: Problem) -> KernelLaunch | None:
    """A warp for each new row of keys and of values, and for each row of queries that is rotated."""
    rows = 2 * problem.batch_size * problem.seqlen_new * problem.nheads_k
    if problem.rotary_dim:
        rows += problem.total_q * problem.nheads
    if problem.seqlen_new == 0 or rows == 0:
        return None
    # Caches have the dtype of q, on every GPU.
    columns = AppendConfig.columns_for(problem.headdim, problem.headdim_v)
    config = AppendConfig(problem.dtype, CACHE_FORMATS[problem.cache_dtype], columns)
    return KernelLaunch(config, 0, -(-rows // config.num_warps))


def attention_template(
    problem: Problem,
    inputs: Inputs,
    waves: Waves = NO_WAVES,
    split: Split | None = None,
    report_at: int = 0,
) -> bytes:
    """The parameters of a call without its pointers. report_at: LengthReport.address, or 0."""
    bias, alibi, table = inputs.attn_bias, inputs.alibi_slopes, inputs.block_table
    varlen = problem.layout is Layout.VARLEN
    headdim_v = inputs.v.shape[-1]
    out_row = problem.nheads * headdim_v
    lse_head = problem.total_q if varlen else problem.seqlen_q
    split, page_block_size = split or Split(), problem.page_block_size or 0
    block_m, block_n = problem.block_size or (0, 0)
    return AttentionParams.template(
        **named_strides("q", token_strides(inputs.q)),
        **named_strides("k", token_strides(inputs.k)),
        **named_strides("v", token_strides(inputs.v)),
        **named_strides("k_scale", first_strides(inputs.k_scale)),
        **named_strides("v_scale", first_strides(inputs.v_scale)),
        **named_strides("out", (0 if varlen else problem.seqlen_q * out_row, out_row, headdim_v)),
        **named_strides("lse", (0 if varlen else problem.nheads * lse_head, lse_head), "batch head"),
        **named_strides("bias", score_strides(bias), "batch head row key"),
        **named_strides("block", score_strides(inputs.block_mask), "batch head row key"),
        **named_strides("tile", score_strides(inputs.tile_index), "batch head row key"),
        **divisor("group", problem.group_size),
        **divisor("page", page_block_size),
        **divisor("units", split.num_units),
        **divisor("cta_groups", split.num_cta_groups),
        alibi_stride_batch=0 if alibi is None or alibi.dim() == 1 else alibi.stride(0),
        block_table_stride=0 if table is None else table.stride(0),
        report_at=report_at,
        batch_size=problem.batch_size,
        seqlen_q=problem.seqlen_q,
        seqlen_k=problem.seqlen_k,
        seqlen_new=problem.seqlen_new,
        max_cache_seqlen=max_cache_seqlen(problem, inputs),
        nheads=problem.nheads,
        group_size=problem.group_size,
        headdim=inputs.q.shape[-1],
        headdim_v=headdim_v,
        page_block_size=page_block_size,
        window_left=problem.window_left,
        window_right=problem.window_right,
        block_m=block_m,
        block_n=block_n,
        bias_is_float=bias is not None and bias.dtype == torch.float32,
        num_m_tiles=waves.num_m_tiles,
        heads_per_l2_wave=waves.heads_per_wave,
        heads_before_last_wave=waves.heads_before_last,
        num_units=split.num_units,
        num_cta_groups=split.num_cta_groups,
        num_splits=split.num_splits,
        partial_rows=split.partial_rows,
        teams_of_row=split.teams_of_row,
        dropout_threshold=dropout_threshold(problem.dropout_p),
        softmax_scale=problem.softmax_scale,
        softcap=problem.softcap,
        dropout_factor=1.0 / (1.0 - problem.dropout_p),
    )


def dropout_threshold(dropout_p: float) -> int:
    """The threshold of backends/common/dropout.py in the upper half of an int32."""
    return ((threshold(dropout_p) << 16) ^ 1 << 31) - (1 << 31)


def max_cache_seqlen(problem: Problem, inputs: Inputs) -> int:
    """Most tokens in a sequence's cache before the call: it needs room for new ones, and angles for them and q."""
    room = problem.seqlen_k - problem.seqlen_new
    if inputs.rotary_cos is None:
        return room
    steps = max(problem.seqlen_new, problem.seqlen_q if problem.has_window else min(problem.seqlen_q, 1))
    return min(room, inputs.rotary_cos.shape[0] - steps)


def append_template(problem: Problem, inputs: Inputs) -> bytes:
    """Parameters of the append before a call, without addresses."""
    table = inputs.block_table
    return AppendParams.template(
        **named_strides("k_new", token_strides(inputs.k_new)),
        **named_strides("v_new", token_strides(inputs.v_new)),
        **named_strides("k", token_strides(inputs.k)),
        **named_strides("v", token_strides(inputs.v)),
        **named_strides("k_scale", first_strides(inputs.k_scale)),
        **named_strides("v_scale", first_strides(inputs.v_scale)),
        **named_strides("q", token_strides(inputs.q if problem.rotary_dim else None)),
        block_table_stride=0 if table is None else table.stride(0),
        batch_size=problem.batch_size,
        seqlen_q=problem.seqlen_q,
        seqlen_new=problem.seqlen_new,
        nheads=problem.nheads,
        nheads_k=problem.nheads_k,
        headdim=problem.headdim,
        headdim_v=problem.headdim_v,
        page_block_size=problem.page_block_size or 0,
        max_cache_seqlen=max_cache_seqlen(problem, inputs),
        rotary_dim=problem.rotary_dim,
        rotary_interleaved=problem.rotary_interleaved,
        rotates_by_token=problem.has_window,
    )


_make_append = AppendParams.maker(
    "k_new", "v_new", "k", "v", "k_scale", "v_scale", "q", "q_rotated", "rotary_cos", "rotary_sin",
    "cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table",
)  # fmt: skip


def append_params(template: bytes, inputs: Inputs, q_rotated: Tensor | None) -> Params:
    """The parameters of an append. q_rotated: where rotated queries go; None without rotary embedding."""
    tensors = (
        inputs.k_new, inputs.v_new, inputs.k, inputs.v, inputs.k_scale, inputs.v_scale,
        None if q_rotated is None else inputs.q, q_rotated, inputs.rotary_cos, inputs.rotary_sin,
        inputs.cache_seqlens, inputs.cache_batch_idx, inputs.cache_leftpad, inputs.block_table,
    )  # fmt: skip
    return _make_append(template, *pointers(*tensors))
