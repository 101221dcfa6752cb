"""Rotary embedding and append to a KV cache in plain torch, for any device, dense caches and pages."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Problem
from fastattention.quantized import quantize


def append_tokens(problem: Problem, inputs: Inputs) -> Tensor:
    """Writes k_new (rotated) and v_new into the caches in place; returns q, rotated when there are rotary tables.

    Quantized caches get quantized tokens and their scales.

    Token i of sequence b goes to cache position cache_seqlens[b] + i and is rotated by that position. Query i is
    rotated by cache_seqlens[b] + i when the mask is causal or windowed, otherwise by cache_seqlens[b].
    """
    assert inputs.cache_seqlens is not None
    assert inputs.k_new is not None
    assert inputs.v_new is not None
    first = inputs.cache_seqlens.long().unsqueeze(1)
    positions = first + torch.arange(problem.seqlen_new, device=first.device)
    q, k_new = inputs.q, inputs.k_new
    if problem.cache_dtype is not None:
        k_new = k_new.float()  # quantization rounds once
    if problem.rotary_dim:
        steps = torch.arange(problem.seqlen_q if problem.has_window else 1, device=first.device)
        q = rotate(problem, inputs, q, first + steps)
        k_new = rotate(problem, inputs, k_new, positions)
    row, slot = _places(problem, inputs, positions)
    _write(inputs.k, inputs.k_scale, (row, slot), k_new)
    _write(inputs.v, inputs.v_scale, (row, slot), inputs.v_new)
    return q


def rotate(problem: Problem, inputs: Inputs, x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of the first rotary_dim elements of each head, computed in float32 and rounded once.

    x: (batch_size, seqlen, heads, headdim)
    positions: int64 (batch_size, seqlen) or (batch_size, 1), rows of the rotary tables
    """
    assert inputs.rotary_cos is not None
    assert inputs.rotary_sin is not None
    cos = inputs.rotary_cos[positions].unsqueeze(2).float()  # (batch_size, seqlen or 1, 1, rotary_dim / 2)
    sin = inputs.rotary_sin[positions].unsqueeze(2).float()
    turned = x[..., : problem.rotary_dim].float()
    if problem.rotary_interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if problem.rotary_interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., problem.rotary_dim :]), dim=-1)


def _write(cache: Tensor, scale: Tensor | None, where: tuple[Tensor, Tensor], new: Tensor) -> None:
    """Writes new tokens to their places, quantized when the cache has scales."""
    if scale is None:
        cache.index_put_(where, new)
        return
    stored, new_scale = quantize(new, cache.dtype)
    cache.view(torch.uint8).index_put_(where, stored.view(torch.uint8))  # not every torch puts float8
    scale.index_put_(where, new_scale)


def _places(problem: Problem, inputs: Inputs, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of `positions` (batch_size, seqlen_new): (page, slot in it) or (row of the cache, token)."""
    if inputs.block_table is not None:
        assert problem.page_block_size is not None
        page = positions // problem.page_block_size
        return inputs.block_table.long().gather(1, page), positions % problem.page_block_size
    if inputs.cache_batch_idx is not None:
        return inputs.cache_batch_idx.long().unsqueeze(1), positions
    return torch.arange(problem.batch_size, device=positions.device).unsqueeze(1), positions
