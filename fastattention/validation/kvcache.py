"""Calls with a key/value cache: arguments to (Problem, Inputs), with every check before the first write."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.errors import ArgumentError
from fastattention.problem import Inputs, Layout, Problem
from fastattention.validation import lengths
from fastattention.validation.common import (
    Options,
    Signature,
    as_float32,
    check_bias,
    check_index,
    check_like_q,
    check_options,
    check_qkv,
    check_rank,
    check_score_tensors,
    check_shape,
    last_axis_contiguous,
    needs_grad,
    require_tensor,
    signature,
)
from fastattention.validation.prefill import PAGED_AXES


class KvCacheArguments(NamedTuple):
    """The tensors of fast_attn_with_kvcache, in its order; `cache_seqlens` may be one length for all sequences."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    cache_seqlens: Tensor | int | None = None
    cache_batch_idx: Tensor | None = None
    cache_leftpad: Tensor | None = None
    block_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    attn_bias: Tensor | None = None
    sinks: Tensor | None = None


class _Signatures(NamedTuple):
    """Signatures of KvCacheArguments, with cache_seqlens already a tensor."""

    q: Signature
    k_cache: Signature
    v_cache: Signature
    k: Signature | None
    v: Signature | None
    rotary_cos: Signature | None
    rotary_sin: Signature | None
    cache_seqlens: Signature
    cache_batch_idx: Signature | None
    cache_leftpad: Signature | None
    block_table: Signature | None
    alibi_slopes: Signature | None
    attn_bias: Signature | None
    sinks: Signature | None


def prepare_kvcache(
    arguments: KvCacheArguments, options: Options, rotary_interleaved: bool = True, num_splits: int = 0
) -> tuple[Problem, Inputs]:
    """Problem and Inputs of fast_attn_with_kvcache. Reads the caches' shapes only; writes nothing."""
    a = arguments
    for name in ("q", "k_cache", "v_cache"):
        require_tensor(name, getattr(a, name))
    a = a._replace(cache_seqlens=_cache_seqlens(a))
    problem = _kvcache_problem(
        _Signatures(*(signature(tensor) for tensor in a)),  # type: ignore[arg-type]
        options,
        bool(rotary_interleaved),
        int(num_splits),
        needs_grad(a.q, a.k_cache, a.v_cache, a.k, a.v, a.alibi_slopes, a.attn_bias, a.sinks),
    )
    for name, cache in (("k_cache", a.k_cache), ("v_cache", a.v_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] != 1:
            raise ArgumentError(f"{name} must have a contiguous last axis, got strides {cache.stride()}")
    if a.q.device.type == "cpu":
        _check_numbers(problem, a)
    return problem, _inputs(problem, a)


def _cache_seqlens(a: KvCacheArguments) -> Tensor:
    if a.cache_seqlens is None:
        if a.k is not None:
            raise ArgumentError("cache_seqlens is needed when k and v are appended: it says where they go")
        capacity = a.k_cache.shape[1] if a.block_table is None else a.k_cache.shape[1] * a.block_table.shape[-1]
        return torch.full((a.q.shape[0],), capacity, dtype=torch.int32, device=a.q.device)
    if isinstance(a.cache_seqlens, int):
        return torch.full((a.q.shape[0],), a.cache_seqlens, dtype=torch.int32, device=a.q.device)
    return require_tensor("cache_seqlens", a.cache_seqlens).contiguous()


@functools.lru_cache(maxsize=4096)
def _kvcache_problem(
    s: _Signatures, options: Options, rotary_interleaved: bool, num_splits: int, needs_grad: bool
) -> Problem:
    check_rank("q", s.q, "batch_size, seqlen_q, nheads, headdim")
    cache_axes = "batch_size_cache, seqlen_cache, nheads_k, headdim" if s.block_table is None else PAGED_AXES
    check_rank("k_cache", s.k_cache, cache_axes)
    check_rank("v_cache", s.v_cache, cache_axes + "_v")
    check_qkv(s.q, s.k_cache, s.v_cache, "k_cache", "v_cache")
    if s.v_cache.shape[:2] != s.k_cache.shape[:2]:
        raise ArgumentError(
            f"k_cache and v_cache must hold the same tokens, got {tuple(s.k_cache.shape)}, {tuple(s.v_cache.shape)}"
        )
    batch_size, seqlen_q, nheads, headdim = s.q.shape
    capacity = _check_cache_indices(s, batch_size)
    seqlen_new = _check_new_tokens(s, batch_size)
    rotary_dim = _check_rotary(s, headdim)
    check_score_tensors(s.q, batch_size, nheads, s.alibi_slopes, s.sinks)
    check_bias(s.attn_bias, s.q, (batch_size, nheads, seqlen_q, capacity), "batch_size, nheads, seqlen_q, capacity")
    if num_splits < 0:
        raise ArgumentError(f"num_splits={num_splits} must be at least 0 (0 lets the backend choose)")
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
        has_alibi=s.alibi_slopes is not None,
        has_bias=s.attn_bias is not None,
        has_sinks=s.sinks is not None,
        needs_grad=needs_grad,
        page_block_size=None if s.block_table is None else s.k_cache.shape[1],
        seqlen_new=seqlen_new,
        rotary_dim=rotary_dim,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        **check_options(options, headdim)._asdict(),
    )


def _check_cache_indices(s: _Signatures, batch_size: int) -> int:
    """Checks lengths and index tensors by shape; returns the capacity of a sequence in tokens."""
    for name in ("cache_seqlens", "cache_batch_idx", "cache_leftpad"):
        tensor = getattr(s, name)
        if tensor is not None:
            check_index(name, tensor, s.q, (batch_size,), "batch_size")
    if s.block_table is not None:
        check_index("block_table", s.block_table, s.q, (batch_size, -1), "batch_size, max_blocks_per_seq")
        if s.cache_batch_idx is not None:
            raise ArgumentError("cache_batch_idx cannot be combined with block_table; index the rows of block_table instead")
        if s.k_cache.shape[1] < 1:
            raise ArgumentError("page_block_size=0: k_cache must be (" + PAGED_AXES + ") with at least one token a page")
        return int(s.block_table.shape[1] * s.k_cache.shape[1])
    if s.cache_batch_idx is None and s.k_cache.shape[0] != batch_size:
        raise ArgumentError(
            f"k_cache holds {s.k_cache.shape[0]} sequences and q {batch_size}; give cache_batch_idx to choose among them"
        )
    return int(s.k_cache.shape[1])


def _check_new_tokens(s: _Signatures, batch_size: int) -> int:
    """Checks k and v to append; returns how many tokens they add to each sequence."""
    if (s.k is None) != (s.v is None):
        raise ArgumentError("k and v must be given together, got only " + ("v" if s.k is None else "k"))
    if s.k is None or s.v is None:
        return 0
    check_rank("k", s.k, "batch_size, seqlen_new, nheads_k, headdim")
    for name, new, cache in (("k", s.k, s.k_cache), ("v", s.v, s.v_cache)):
        check_like_q(name, new, s.q)
        expected = (batch_size, s.k.shape[1], *cache.shape[2:])
        check_shape(name, new, expected, "batch_size, seqlen_new, nheads_k, headdim" + ("_v" if name == "v" else ""))
    return int(s.k.shape[1])


def _check_rotary(s: _Signatures, headdim: int) -> int:
    """Checks the rotary tables by shape; returns rotary_dim, 0 without them."""
    if (s.rotary_cos is None) != (s.rotary_sin is None):
        missing = "rotary_cos" if s.rotary_cos is None else "rotary_sin"
        raise ArgumentError(f"rotary_cos and rotary_sin must be given together, {missing} is missing")
    if s.rotary_cos is None or s.rotary_sin is None:
        return 0
    if s.k is None:
        raise ArgumentError("rotary_cos needs k and v: rotary embedding is applied where tokens are appended")
    check_rank("rotary_cos", s.rotary_cos, "seqlen_rotary, rotary_dim / 2")
    check_shape("rotary_sin", s.rotary_sin, tuple(s.rotary_cos.shape), "seqlen_rotary, rotary_dim / 2")
    check_like_q("rotary_cos", s.rotary_cos, s.q)
    check_like_q("rotary_sin", s.rotary_sin, s.q)
    rotary_dim = 2 * s.rotary_cos.shape[1]
    if not 2 <= rotary_dim <= headdim:
        raise ArgumentError(f"rotary_dim={rotary_dim} (twice rotary_cos.shape[1]) must be 2 to headdim={headdim}")
    return rotary_dim


def _check_numbers(problem: Problem, a: KvCacheArguments) -> None:
    """Everything that depends on the numbers in index tensors."""
    assert isinstance(a.cache_seqlens, Tensor)
    before: list[int] = a.cache_seqlens.tolist()
    fill = f"{problem.seqlen_k} tokens of capacity, {problem.seqlen_new} of them for k and v"
    lengths.check_range("cache_seqlens", before, 0, problem.seqlen_k - problem.seqlen_new, fill)
    if a.cache_leftpad is not None:
        for index, (pad, length) in enumerate(zip(a.cache_leftpad.tolist(), before, strict=True)):
            if not 0 <= pad <= length:
                raise ArgumentError(f"cache_leftpad[{index}]={pad} must be 0 to cache_seqlens[{index}]={length}")
    if a.cache_batch_idx is not None:
        rows: list[int] = a.cache_batch_idx.tolist()
        lengths.check_range("cache_batch_idx", rows, 0, a.k_cache.shape[0] - 1, "sequences in k_cache")
        if problem.seqlen_new and len(set(rows)) != len(rows):
            raise ArgumentError(f"cache_batch_idx={rows} must not repeat a sequence when k and v are appended")
    if a.block_table is not None:
        after = [length + problem.seqlen_new for length in before]
        lengths.check_block_table(a.block_table, after, a.k_cache.shape[1], a.k_cache.shape[0])
    if a.rotary_cos is not None and before:
        last = max(before) + max(problem.seqlen_new, problem.seqlen_q)
        if last > a.rotary_cos.shape[0]:
            raise ArgumentError(f"rotary_cos has {a.rotary_cos.shape[0]} positions; this call needs {last}")


def _inputs(problem: Problem, a: KvCacheArguments) -> Inputs:
    assert isinstance(a.cache_seqlens, Tensor)
    bias = a.attn_bias
    if bias is not None:
        bias = bias.expand(problem.batch_size, problem.nheads, problem.seqlen_q, problem.seqlen_k)
    return Inputs(
        last_axis_contiguous(a.q),
        a.k_cache,
        a.v_cache,
        cache_seqlens=a.cache_seqlens,
        cache_batch_idx=None if a.cache_batch_idx is None else a.cache_batch_idx.contiguous(),
        cache_leftpad=None if a.cache_leftpad is None else a.cache_leftpad.contiguous(),
        block_table=None if a.block_table is None else last_axis_contiguous(a.block_table),
        k_new=None if a.k is None else last_axis_contiguous(a.k),
        v_new=None if a.v is None else last_axis_contiguous(a.v),
        rotary_cos=None if a.rotary_cos is None else a.rotary_cos.contiguous(),
        rotary_sin=None if a.rotary_sin is None else a.rotary_sin.contiguous(),
        alibi_slopes=as_float32(a.alibi_slopes),
        attn_bias=bias,
        sinks=as_float32(a.sinks),
    )
