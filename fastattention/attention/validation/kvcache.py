"""fast_attn_with_kvcache: arguments to (Problem, Inputs), with every check before the first write."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.attention.validation import lengths
from fastattention.attention.validation.common import (
    KvCacheArguments,
    Options,
    ScoreSpecs,
    as_kernels_read,
    check_options,
    check_score_tensors,
    score_specs,
)
from fastattention.attention.validation.prefill import PAGED_AXES
from fastattention.attention.validation.quantized import check_not_expanded, check_stored
from fastattention.engine.checks import (
    Differentiation,
    TensorSpec,
    check_index,
    check_like_q,
    check_rank,
    check_shape,
    differentiation,
    require_tensors,
    spec_of,
)
from fastattention.engine.kinds import check_readable
from fastattention.errors import ArgumentError


class _Specs(NamedTuple):
    """Specs of KvCacheArguments, but for SCORE_TENSORS; the one of cache_seqlens is None unless it is a tensor."""

    q: TensorSpec
    k_cache: TensorSpec
    v_cache: TensorSpec
    k: TensorSpec | None
    v: TensorSpec | None
    rotary_cos: TensorSpec | None
    rotary_sin: TensorSpec | None
    cache_seqlens: TensorSpec | None
    cache_batch_idx: TensorSpec | None
    cache_leftpad: TensorSpec | None
    block_table: TensorSpec | None
    k_scale: TensorSpec | None
    v_scale: TensorSpec | None


def prepare_kvcache(arguments: KvCacheArguments, options: Options) -> tuple[Problem, Inputs]:
    """Problem and Inputs of fast_attn_with_kvcache. Reads the caches' shapes only; writes nothing."""
    a, panels = arguments, options.panels
    try:
        specs = _specs(a)
        if a.cache_seqlens is None and a.k is not None:
            raise ArgumentError("cache_seqlens=None with k and v given: it must say at which position to append them")
        problem = _kvcache_problem(
            specs if panels is None else specs._replace(k_cache=panels.k, v_cache=panels.v),
            score_specs(a),
            options,
            differentiation(**a._asdict()),
        )
        _check_strides(a)
        inputs = lengths.check_cache(problem, a.inputs(), a.cache_seqlens)
        return problem, as_kernels_read(problem, inputs)
    except (RuntimeError, TypeError):
        check_readable(a._asdict())
        raise


def _specs(a: KvCacheArguments) -> _Specs:
    if a.q is None or a.k_cache is None or a.v_cache is None:
        require_tensors(q=a.q, k_cache=a.k_cache, v_cache=a.v_cache)  # type: ignore[unreachable]
    if not isinstance(a.cache_seqlens, Tensor):
        a = a._replace(cache_seqlens=None)
    tensors = [(name, getattr(a, name)) for name in _Specs._fields]
    return _Specs(*(None if x is None else spec_of(name, x) for name, x in tensors))  # type: ignore[arg-type]


def _check_strides(a: KvCacheArguments) -> None:
    """Checks strides of caches, which are used and written in place and hence never copied."""
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        if cache.stride()[-1] != 1 and cache.shape[-1] != 1:
            raise ArgumentError(f"{name} must have a contiguous last axis, got strides {cache.stride()}")
        if a.k is not None:
            check_not_expanded(name, cache.shape, cache.stride())


# Tensor-parallel calls to caches are not known by a signature.
@functools.lru_cache(maxsize=4096)
def _kvcache_problem(s: _Specs, scores: ScoreSpecs, options: Options, wanted: Differentiation) -> Problem:
    check_rank("q", s.q, "batch_size, seqlen_q, nheads, headdim")
    cache_dtype = _check_caches(s)
    batch_size, seqlen_q, nheads, headdim = s.q.shape
    capacity = _check_cache_indices(s, batch_size)
    seqlen_new = _check_new_tokens(s, batch_size)
    rotary_dim = _check_rotary(s, headdim)
    bias_shape, bias_axes = (batch_size, nheads, seqlen_q, capacity), "batch_size, nheads, seqlen_q, capacity"
    score_tensors = check_score_tensors(scores, s.q, batch_size, bias_shape, bias_axes)
    if not 0 <= options.num_splits < 2**31:
        raise ArgumentError(
            f"num_splits={options.num_splits} must be at least 0 (0 lets the backend choose) and below 2^31"
        )
    return Problem(
        layout=Layout.KVCACHE,
        device=s.q.device,
        dtype=s.q.dtype,
        batch_size=batch_size,
        seqlen_q=seqlen_q,
        seqlen_k=capacity,
        total_q=batch_size * seqlen_q,
        nheads=nheads,
        nheads_k=s.k_cache.shape[2],
        headdim=headdim,
        headdim_v=s.v_cache.shape[3],
        score_tensors=score_tensors,
        **wanted._asdict(),
        page_block_size=None if s.block_table is None else s.k_cache.shape[1],
        panel_size=0 if options.panels is None else options.panels.panel_size,
        seqlen_new=seqlen_new,
        rotary_dim=rotary_dim,
        rotary_interleaved=options.rotary_interleaved,
        num_splits=options.num_splits,
        cache_dtype=cache_dtype,
        **check_options(options, headdim, seqlen_q, capacity)._asdict(),
    )


def _check_caches(s: _Specs) -> torch.dtype | None:
    """Checks the caches by themselves and beside q; their dtype where they come with scales."""
    axes = "batch_size_cache, seqlen_cache, nheads_k, headdim" if s.block_table is None else PAGED_AXES
    check_rank("k_cache", s.k_cache, axes)
    check_rank("v_cache", s.v_cache, axes + "_v")
    cache_dtype = check_stored(s.q, s.k_cache, s.v_cache, (s.k_scale, s.v_scale), axes)
    if s.v_cache.shape[:2] != s.k_cache.shape[:2]:
        raise ArgumentError(
            f"k_cache and v_cache must hold the same tokens, got {tuple(s.k_cache.shape)}, {tuple(s.v_cache.shape)}"
        )
    return cache_dtype


def _check_cache_indices(s: _Specs, batch_size: int) -> int:
    """Checks lengths and index tensors by shape; returns the capacity of a sequence in tokens."""
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        tensor = getattr(s, name)
        if tensor is not None:
            check_index(name, tensor, s.q, (batch_size,), "batch_size")
    if s.block_table is not None:
        check_index("block_table", s.block_table, s.q, (batch_size, -1), "batch_size, max_blocks_per_seq")
        if s.cache_batch_idx is not None:
            raise ArgumentError(
                f"cache_batch_idx, got {s.cache_batch_idx}, cannot be combined with block_table; "
                "index the rows of block_table instead"
            )
        if s.k_cache.shape[1] < 1:
            raise ArgumentError(
                f"k_cache must be ({PAGED_AXES}) with at least one token a page, got shape {tuple(s.k_cache.shape)}"
            )
        return int(s.block_table.shape[1] * s.k_cache.shape[1])
    if s.cache_batch_idx is None and s.k_cache.shape[0] != batch_size:
        raise ArgumentError(
            f"k_cache holds {s.k_cache.shape[0]} sequences and q {batch_size}; they must be the same, or give "
            "cache_batch_idx to choose among them"
        )
    return int(s.k_cache.shape[1])


def _check_new_tokens(s: _Specs, batch_size: int) -> int:
    """Checks k and v to append; returns how many tokens they add to each sequence."""
    if (s.k is None) != (s.v is None):
        raise ArgumentError(f"k and v must be given together, got only {'v' if s.k is None else 'k'}")
    if s.k is None or s.v is None:
        return 0
    check_rank("k", s.k, "batch_size, seqlen_new, nheads_k, headdim")
    for name, new, cache in (("k", s.k, s.k_cache), ("v", s.v, s.v_cache)):
        check_like_q(name, new, s.q)
        expected = (batch_size, s.k.shape[1], *cache.shape[2:])
        check_shape(name, new, expected, "batch_size, seqlen_new, nheads_k, headdim" + ("_v" if name == "v" else ""))
    return s.k.shape[1]


def _check_rotary(s: _Specs, headdim: int) -> int:
    """Checks the rotary tables by shape; returns rotary_dim, 0 without them."""
    if (s.rotary_cos is None) != (s.rotary_sin is None):
        missing = "rotary_cos" if s.rotary_cos is None else "rotary_sin"
        raise ArgumentError(f"rotary_cos and rotary_sin must be given together, got no {missing}")
    if s.rotary_cos is None or s.rotary_sin is None:
        return 0
    if s.k is None:
        raise ArgumentError("rotary_cos must come with k and v, got none: rotary embedding goes with an append")
    check_rank("rotary_cos", s.rotary_cos, "seqlen_rotary, rotary_dim / 2")
    check_shape("rotary_sin", s.rotary_sin, tuple(s.rotary_cos.shape), "seqlen_rotary, rotary_dim / 2")
    check_like_q("rotary_cos", s.rotary_cos, s.q)
    check_like_q("rotary_sin", s.rotary_sin, s.q)
    rotary_dim = 2 * s.rotary_cos.shape[1]
    if not 2 <= rotary_dim <= headdim:
        raise ArgumentError(f"rotary_dim={rotary_dim} (twice rotary_cos.shape[1]) must be 2 to headdim={headdim}")
    return rotary_dim
