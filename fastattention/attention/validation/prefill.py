"""fast_attn_func and fast_attn_varlen_func: arguments to (Problem, Inputs)."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.attention.validation import lengths
from fastattention.attention.validation.block_masks import check_block_mask, check_tiles
from fastattention.attention.validation.common import (
    Options,
    ScoreSpecs,
    as_kernels_read,
    check_options,
    check_qkv,
    check_score_tensors,
    score_specs,
)
from fastattention.attention.validation.quantized import check_stored
from fastattention.engine.checks import (
    Differentiation,
    TensorSpec,
    check_index,
    check_rank,
    differentiation,
    require_tensors,
    spec_of,
)
from fastattention.engine.kinds import check_readable
from fastattention.errors import ArgumentError

PAGED_AXES = "num_blocks, page_block_size, nheads_k, headdim"


def prepare_dense(
    q: Tensor, k: Tensor, v: Tensor, options: Options, **optional: Tensor | None
) -> tuple[Problem, Inputs]:
    """Problem and Inputs of fast_attn_func; optional: other fields of Inputs."""
    return prepare_prefill(Inputs(q, k, v, **optional), options)


def prepare_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    options: Options,
    **optional: Tensor | None,
) -> tuple[Problem, Inputs]:
    """Problem and Inputs of fast_attn_varlen_func; optional: other fields of Inputs."""
    given = Inputs(q, k, v, cu_seqlens_q, cu_seqlens_k, **optional)
    return prepare_prefill(given, options._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k))


def prepare_prefill(given: Inputs, options: Options) -> tuple[Problem, Inputs]:
    """Problem and Inputs of a call without a cache: a varlen one if it has cu_seqlens, else a dense one."""
    varlen = given.cu_seqlens_q is not None or given.cu_seqlens_k is not None
    required = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k") if varlen else ("q", "k", "v")
    try:
        require_tensors(**{name: getattr(given, name) for name in required})
        specs = _specs(given)
        longest = None
        if varlen:
            _check_varlen_shapes(specs)
            longest = lengths.check_varlen(given, options)
        problem = _problem(specs, score_specs(given), longest, options, differentiation(**given._asdict()))
        return problem, as_kernels_read(problem, given)
    except (RuntimeError, TypeError):
        check_readable(given._asdict())
        raise


class _Specs(NamedTuple):
    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    cu_seqlens_q: TensorSpec | None
    cu_seqlens_k: TensorSpec | None
    block_table: TensorSpec | None
    block_mask: TensorSpec | None
    tile_index: TensorSpec | None
    tile_bits: TensorSpec | None
    k_scale: TensorSpec | None
    v_scale: TensorSpec | None


def _specs(given: Inputs) -> _Specs:
    tensors = [(name, getattr(given, name)) for name in _Specs._fields]
    return _Specs(*(None if x is None else spec_of(name, x) for name, x in tensors))  # type: ignore[arg-type]


def check_varlen_shapes(given: Inputs) -> None:
    """Checks the tensors of a varlen call from shapes, dtypes and devices alone."""
    require_tensors(q=given.q, k=given.k, v=given.v, cu_seqlens_q=given.cu_seqlens_q, cu_seqlens_k=given.cu_seqlens_k)
    _check_varlen_shapes(_specs(given))


def _check_varlen_shapes(s: _Specs) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, block_table = s[:6]
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    check_rank("q", q, "total_q, nheads, headdim")
    if block_table is None:
        check_rank("k", k, "total_k, nheads_k, headdim")
        check_rank("v", v, "total_k, nheads_k, headdim_v")
        if s.k_scale is not None or s.v_scale is not None:
            raise ArgumentError(
                "k_scale and v_scale belong to quantized pages: give block_table, or dequantize k and v"
            )
        check_qkv(q, k, v)
    else:
        check_rank("k", k, PAGED_AXES)
        check_rank("v", v, PAGED_AXES + "_v")
        check_stored(q, k, v, (s.k_scale, s.v_scale), PAGED_AXES, ("k", "v"))
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


def check_dense_shapes(given: Inputs) -> None:
    """Checks q, k and v of a dense call from shapes, dtypes and devices alone."""
    _check_dense_shapes(*(spec_of(name, getattr(given, name)) for name in "qkv"))


def _check_dense_shapes(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> None:
    check_rank("q", q, "batch_size, seqlen_q, nheads, headdim")
    check_rank("k", k, "batch_size, seqlen_k, nheads_k, headdim")
    check_rank("v", v, "batch_size, seqlen_k, nheads_k, headdim_v")
    check_qkv(q, k, v)
    batch_size = q.shape[0]
    if k.shape[0] != batch_size or v.shape[0] != batch_size:
        raise ArgumentError(f"q, k and v must have one batch_size, got {batch_size}, {k.shape[0]} and {v.shape[0]}")
    if v.shape[1] != k.shape[1]:
        raise ArgumentError(f"v has seqlen_k {v.shape[1]} and k has {k.shape[1]}; they must be the same")


# Tensor-parallel calls with biases, slopes, sinks or given blocks are not known by a signature.
@functools.lru_cache(maxsize=4096)
def _problem(
    s: _Specs, scores: ScoreSpecs, longest: tuple[int, int] | None, options: Options, wanted: Differentiation
) -> Problem:
    """longest: checked maxima of a varlen call; None for a dense one, whose shapes are checked here."""
    q, k, v = s.q, s.k, s.v
    bias_shape: tuple[int, ...]
    if longest is None:
        _check_dense_shapes(q, k, v)
        nheads, headdim = q.shape[-2:]
        batch_size, seqlen_q = q.shape[:2]
        seqlen_k, total_q = k.shape[1], batch_size * seqlen_q
        bias_shape, bias_axes = (batch_size, nheads, seqlen_q, seqlen_k), "batch_size, nheads, seqlen_q, seqlen_k"
    else:
        assert s.cu_seqlens_q is not None
        nheads, headdim = q.shape[-2:]
        batch_size, total_q = s.cu_seqlens_q.shape[0] - 1, q.shape[0]
        seqlen_q, seqlen_k = longest
        bias_shape, bias_axes = (nheads, total_q, seqlen_k), "nheads, total_q, max_seqlen_k"
    stored = [name for name in ("k", "v", "k_scale", "v_scale") if name in wanted.grads]
    if s.k_scale is not None and stored:
        raise ArgumentError(
            f"{' and '.join(stored)} must not require gradients: quantized pages and their scales have none"
        )
    score_tensors = check_score_tensors(scores, q, batch_size, bias_shape, bias_axes)
    block_size = check_block_mask(s.block_mask, q, nheads, batch_size, (seqlen_q, seqlen_k), options)
    tiles = check_tiles(s.tile_index, s.tile_bits, q, nheads, (batch_size, seqlen_q, seqlen_k), longest is not None)
    return Problem(
        layout=Layout.DENSE if longest is None else Layout.VARLEN,
        device=q.device,
        dtype=q.dtype,
        batch_size=batch_size,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        total_q=total_q,
        nheads=nheads,
        nheads_k=k.shape[-2],
        headdim=headdim,
        headdim_v=v.shape[-1],
        score_tensors=score_tensors,
        block_size=block_size,
        hides_pairs=tiles,
        **wanted._asdict(),
        page_block_size=None if s.block_table is None else k.shape[1],
        cache_dtype=None if s.k_scale is None else k.dtype,
        **check_options(options, headdim, seqlen_q, seqlen_k)._asdict(),
    )
