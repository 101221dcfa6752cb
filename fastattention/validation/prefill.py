"""fast_attn_func and fast_attn_varlen_func: arguments to (Problem, Inputs)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastattention.errors import ArgumentError
from fastattention.problem import Inputs, Layout, Problem
from fastattention.validation import lengths
from fastattention.validation.common import (
    Options,
    Signature,
    as_kernels_read,
    check_bias,
    check_index,
    check_options,
    check_qkv,
    check_rank,
    check_score_tensors,
    needs_grad,
    require_tensors,
    signature,
)
from fastattention.validation.kinds import check_readable

PAGED_AXES = "num_blocks, page_block_size, nheads_k, headdim"


def prepare_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_seed: Tensor | None = None,
) -> tuple[Problem, Inputs]:
    """Problem and Inputs of fast_attn_func."""
    tensors = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "attn_bias": attn_bias, "sinks": sinks}
    require_tensors(q=q, k=k, v=v)
    try:
        problem = _dense_problem(
            signature("q", q),
            signature("k", k),
            signature("v", v),
            None if alibi_slopes is None else signature("alibi_slopes", alibi_slopes),
            None if attn_bias is None else signature("attn_bias", attn_bias),
            None if sinks is None else signature("sinks", sinks),
            options,
            needs_grad(*tensors.values()),
        )
        inputs = Inputs(
            q, k, v, alibi_slopes=alibi_slopes, attn_bias=attn_bias, sinks=sinks, dropout_seed=dropout_seed
        )  # fmt: skip
        return problem, as_kernels_read(problem, inputs)
    except (RuntimeError, TypeError):
        check_readable(tensors)
        raise


def _dense_problem(
    q: Signature,
    k: Signature,
    v: Signature,
    alibi_slopes: Signature | None,
    attn_bias: Signature | None,
    sinks: Signature | None,
    options: Options,
    needs_grad: bool,
) -> Problem:
    check_rank("q", q, "batch_size, seqlen_q, nheads, headdim")
    check_rank("k", k, "batch_size, seqlen_k, nheads_k, headdim")
    check_rank("v", v, "batch_size, seqlen_k, nheads_k, headdim_v")
    check_qkv(q, k, v)
    batch_size, seqlen_q, nheads, headdim = q.shape
    if k.shape[0] != batch_size or v.shape[0] != batch_size:
        raise ArgumentError(f"q, k and v must have one batch_size, got {batch_size}, {k.shape[0]} and {v.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ArgumentError(f"v has seqlen_k {v.shape[1]} and k has {k.shape[1]}; they must be the same")
    check_score_tensors(q, batch_size, nheads, alibi_slopes, sinks)
    full_shape = (batch_size, nheads, seqlen_q, k.shape[1])
    check_bias(attn_bias, q, full_shape, "batch_size, nheads, seqlen_q, seqlen_k")
    return Problem(
        layout=Layout.DENSE,
        device=q.device,
        dtype=q.dtype,
        batch_size=batch_size,
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        total_q=batch_size * seqlen_q,
        nheads=nheads,
        nheads_k=k.shape[2],
        headdim=headdim,
        headdim_v=v.shape[3],
        has_alibi=alibi_slopes is not None,
        has_bias=attn_bias is not None,
        has_sinks=sinks is not None,
        needs_grad=needs_grad,
        **check_options(options, headdim, seqlen_q, k.shape[1])._asdict(),
    )


def prepare_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    options: Options,
    *,
    block_table: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    attn_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_seed: Tensor | None = None,
) -> tuple[Problem, Inputs]:
    """Problem and Inputs of fast_attn_varlen_func."""
    try:
        shapes = _VarlenSignatures(
            signature("q", q),
            signature("k", k),
            signature("v", v),
            signature("cu_seqlens_q", cu_seqlens_q),
            signature("cu_seqlens_k", cu_seqlens_k),
            None if block_table is None else signature("block_table", block_table),
            None if alibi_slopes is None else signature("alibi_slopes", alibi_slopes),
            None if attn_bias is None else signature("attn_bias", attn_bias),
            None if sinks is None else signature("sinks", sinks),
        )
        _check_varlen_shapes(shapes)
        longest_q, longest_k = lengths.check_varlen(
            q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, block_table
        )
        grad = needs_grad(q, k, v, alibi_slopes, attn_bias, sinks)
        problem = _varlen_problem(shapes, longest_q, longest_k, options, grad)
        inputs = Inputs(
            q, k, v, cu_seqlens_q, cu_seqlens_k, block_table=block_table, alibi_slopes=alibi_slopes,
            attn_bias=attn_bias, sinks=sinks, dropout_seed=dropout_seed,
        )  # fmt: skip
        return problem, as_kernels_read(problem, inputs)
    except (RuntimeError, TypeError):
        tensors = (q, k, v, cu_seqlens_q, cu_seqlens_k, block_table, alibi_slopes, attn_bias, sinks)
        check_readable(dict(zip(_VarlenSignatures._fields, tensors, strict=True)))
        raise


class _VarlenSignatures(NamedTuple):
    q: Signature
    k: Signature
    v: Signature
    cu_seqlens_q: Signature
    cu_seqlens_k: Signature
    block_table: Signature | None
    alibi_slopes: Signature | None
    attn_bias: Signature | None
    sinks: Signature | None


def _check_varlen_shapes(s: _VarlenSignatures) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, block_table = s[:6]
    check_rank("q", q, "total_q, nheads, headdim")
    if block_table is None:
        check_rank("k", k, "total_k, nheads_k, headdim")
        check_rank("v", v, "total_k, nheads_k, headdim_v")
    else:
        check_rank("k", k, PAGED_AXES)
        check_rank("v", v, PAGED_AXES + "_v")
    check_qkv(q, k, v)
    if v.shape[:-2] != k.shape[:-2]:
        raise ArgumentError(f"k and v must hold the same tokens, got shapes {tuple(k.shape)} and {tuple(v.shape)}")
    check_index("cu_seqlens_q", cu_seqlens_q, q, (-1,), "batch_size + 1")
    if cu_seqlens_q.shape[0] < 1:
        raise ArgumentError("cu_seqlens_q must be (batch_size + 1,), got no elements; an empty batch is [0]")
    check_index("cu_seqlens_k", cu_seqlens_k, q, (cu_seqlens_q.shape[0],), "batch_size + 1")
    if block_table is not None:
        batch_size = cu_seqlens_q.shape[0] - 1
        check_index("block_table", block_table, q, (batch_size, -1), "batch_size, max_blocks_per_seq")
        if k.shape[1] < 1:
            raise ArgumentError(f"k must be ({PAGED_AXES}) with at least one token a page, got shape {tuple(k.shape)}")


def _varlen_problem(
    s: _VarlenSignatures, max_seqlen_q: int, max_seqlen_k: int, options: Options, needs_grad: bool
) -> Problem:
    q, k, v, alibi_slopes, attn_bias, sinks = s.q, s.k, s.v, s.alibi_slopes, s.attn_bias, s.sinks
    batch_size = s.cu_seqlens_q.shape[0] - 1
    total_q, nheads, headdim = q.shape
    check_score_tensors(q, batch_size, nheads, alibi_slopes, sinks)
    check_bias(attn_bias, q, (nheads, total_q, max_seqlen_k), "nheads, total_q, max_seqlen_k")
    return Problem(
        layout=Layout.VARLEN,
        device=q.device,
        dtype=q.dtype,
        batch_size=batch_size,
        seqlen_q=max_seqlen_q,
        seqlen_k=max_seqlen_k,
        total_q=total_q,
        nheads=nheads,
        nheads_k=k.shape[-2],
        headdim=headdim,
        headdim_v=v.shape[-1],
        has_alibi=alibi_slopes is not None,
        has_bias=attn_bias is not None,
        has_sinks=sinks is not None,
        needs_grad=needs_grad,
        page_block_size=None if s.block_table is None else k.shape[1],
        **check_options(options, headdim, max_seqlen_q, max_seqlen_k)._asdict(),
    )
