"""Exact attention in plain torch: the executable specification of every public function.

Written to be read, not to be fast: one sequence of the batch after the other, and the whole score matrix at once.
Backends are tested against it; it is not one of them. The file reads top down:

    reference_attention     rotate, append, then every sequence by itself
    apply_rotary            turns q and k_new by their positions
    _append_new_tokens      writes k_new and v_new into the caches, quantized where those are
    _sequence               which q, k, v, bias and slopes belong to one sequence: dense, varlen or cached
    _cache_index            where a position of the cache lies in memory, with and without pages
    _attend                 scores, softcap, ALiBi, bias, masks, softmax, weighted values: all that "attention" means
    _hidden_keys, _kept_keys, _softmax  the masks; the softmax with sinks and with rows that have no keys

It is called like this, and in the same way with prepare_varlen and prepare_kvcache of
`fastattention.attention.validation`:

    problem, inputs = prepare_dense(q, k, v, Options(causal=True))
    out, lse, _ = reference_attention(problem, inputs)
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.mask_tiles import visible_pairs
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.errors import ArgumentError
from fastattention.quantized import dequantize, quantize, quantize_keys


class _Precision(NamedTuple):
    """The dtypes of the computation."""

    matmul: torch.dtype  # q @ k^T and weights @ v
    softmax: torch.dtype  # everything between the two


class _Sequence(NamedTuple):
    """One sequence of the batch by itself: what remains once the layout is out of the way."""

    q: Tensor  # (seqlen_q, nheads, headdim)
    k: Tensor  # (seqlen_k, nheads_k, headdim)
    v: Tensor  # (seqlen_k, nheads_k, headdim_v)
    alibi_slopes: Tensor | None  # (nheads,)
    bias: Tensor | None  # (nheads, seqlen_q, seqlen_k)
    keep: Tensor | None  # bool (nheads, seqlen_q, seqlen_k), False where dropout strikes
    kept: Tensor | None  # bool (nheads, seqlen_q, seqlen_k): pairs that the block mask leaves visible


def reference_attention(
    problem: Problem,
    inputs: Inputs,
    compute_dtype: torch.dtype | None = torch.float64,
    dropout_keep: Tensor | None = None,
) -> AttentionOutput:
    """What every backend must compute for `problem`, to within rounding.

    compute_dtype: dtype of all steps, and of the returned out and lse. None computes as a user of torch would in the
        dtype of the inputs: matrix products in that dtype, the softmax in float32, its weights cast back. The error of
        that run is the yardstick for the error of a backend.
    dropout_keep: bool (batch_size, nheads, seqlen_q, seqlen_k), False where dropout strikes; needed when
        problem.dropout_p is not 0. The reference draws nothing at random.

    Returns out, lse (always) and the dropout mask (with dropout_keep). Everything is differentiable with respect to q,
    k, v, alibi_slopes, attn_bias and sinks. KVCACHE calls with k_new write it into the caches in place, as backends do.
    Raises ArgumentError for a problem with dropout and no dropout_keep.
    """
    if problem.dropout_p and dropout_keep is None:
        raise ArgumentError(f"dropout_p={problem.dropout_p} needs dropout_keep, the mask of the weights that are kept")
    precision = _Precision(compute_dtype or problem.dtype, compute_dtype or torch.float32)
    if problem.rotary_dim:
        problem, inputs = apply_rotary(problem, inputs, precision.softmax)
    if inputs.k_new is not None:
        _append_new_tokens(problem, inputs)

    out = inputs.q.new_zeros(problem.out_shape, dtype=precision.matmul)
    lse = inputs.q.new_zeros(problem.lse_shape, dtype=precision.softmax)
    mask_shape = (problem.batch_size, problem.nheads, problem.seqlen_q, problem.seqlen_k)
    dropout_mask = None if dropout_keep is None else inputs.q.new_zeros(mask_shape)
    for index in range(problem.batch_size):
        sequence = _sequence(problem, inputs, index, dropout_keep)
        sequence_out, sequence_lse, weights = _attend(problem, sequence, inputs.sinks, precision)
        if problem.layout is Layout.VARLEN:
            tokens = _varlen_tokens(inputs.cu_seqlens_q, index)
            out[tokens], lse[:, tokens] = sequence_out, sequence_lse
        else:
            out[index], lse[index] = sequence_out, sequence_lse
        if dropout_mask is not None and sequence.keep is not None:
            _, seqlen_q, seqlen_k = weights.shape
            dropout_mask[index, :, :seqlen_q, :seqlen_k] = torch.where(sequence.keep, weights, -weights)
    return AttentionOutput(out, lse, dropout_mask)


def apply_rotary(problem: Problem, inputs: Inputs, dtype: torch.dtype) -> tuple[Problem, Inputs]:
    """The same call without rotary embedding: its q and k_new are already turned, computed and returned in `dtype`.

    k_new[b, i] is turned by position cache_seqlens[b] + i, where it is going to lie. Under a mask queries are
    successive tokens, so q[b, i] is turned by cache_seqlens[b] + i too; without one all stand where the first new token
    does.
    """
    first_new = _given(inputs.cache_seqlens)[:, None].long()  # (batch_size, 1)
    positions_q = first_new + torch.arange(problem.seqlen_q, device=problem.device) * int(problem.has_window)
    positions_k = first_new + torch.arange(problem.seqlen_new, device=problem.device)
    turned = inputs._replace(
        q=_rotate(problem, inputs, inputs.q.to(dtype), positions_q),
        k_new=_rotate(problem, inputs, _given(inputs.k_new).to(dtype), positions_k),
        rotary_cos=None,
        rotary_sin=None,
    )
    return replace(problem, rotary_dim=0), turned


def _rotate(problem: Problem, inputs: Inputs, x: Tensor, positions: Tensor) -> Tensor:
    """Turns pairs of the first rotary_dim elements of x (batch_size, tokens, heads, headdim) by their positions.

        (first, second) -> (first * cos - second * sin, first * sin + second * cos)

    rotary_interleaved pairs neighbours, (0, 1), (2, 3), ...; otherwise element i goes with element i + rotary_dim / 2.
    positions is (batch_size, tokens).
    """
    cos = _given(inputs.rotary_cos)[positions].to(x.dtype)[:, :, None, :]  # (batch_size, tokens, 1, rotary_dim / 2)
    sin = _given(inputs.rotary_sin)[positions].to(x.dtype)[:, :, None, :]
    turning, still = x[..., : problem.rotary_dim], x[..., problem.rotary_dim :]
    if problem.rotary_interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned = (first * cos - second * sin, first * sin + second * cos)
    if problem.rotary_interleaved:
        return torch.cat((torch.stack(turned, dim=-1).flatten(-2), still), dim=-1)
    return torch.cat((*turned, still), dim=-1)


def _append_new_tokens(problem: Problem, inputs: Inputs) -> None:
    """Writes k_new[b, i] and v_new[b, i] to position cache_seqlens[b] + i of sequence b."""
    for index in range(problem.batch_size):
        length = int(_given(inputs.cache_seqlens)[index])
        positions = torch.arange(length, length + problem.seqlen_new, device=problem.device)
        where = _cache_index(problem, inputs, index, positions)
        k_new, v_new = _given(inputs.k_new)[index], _given(inputs.v_new)[index]
        if problem.cache_dtype is None:
            inputs.k[where], inputs.v[where] = k_new.to(problem.dtype), v_new
        else:
            inputs.k[where], _given(inputs.k_scale)[where] = quantize(k_new, problem.cache_dtype)
            inputs.v[where], _given(inputs.v_scale)[where] = quantize(v_new, problem.cache_dtype)


def _sequence(problem: Problem, inputs: Inputs, index: int, dropout_keep: Tensor | None) -> _Sequence:
    """Sequence number `index` of the batch, cut to its own lengths."""
    bias = inputs.attn_bias
    if problem.layout is Layout.DENSE:
        q, k, v = inputs.q[index], inputs.k[index], inputs.v[index]
        bias = None if bias is None else bias[index]
    elif problem.layout is Layout.VARLEN:
        q, k, v = _varlen_sequence(problem, inputs, index)
        bias = None if bias is None else bias[:, _varlen_tokens(inputs.cu_seqlens_q, index), : len(k)]
    else:
        q, k, v = _kvcache_sequence(problem, inputs, index)
        bias = None if bias is None else bias[index, :, :, : len(k)]
    slopes = inputs.alibi_slopes
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[index]
    keep = None if dropout_keep is None else dropout_keep[index, :, : len(q), : len(k)]
    kept = None if inputs.block_mask is None else _kept_keys(problem, inputs, index, len(q), len(k))
    return _Sequence(q, k, v, slopes, bias, keep, kept)


def _varlen_tokens(cu_seqlens: Tensor | None, index: int) -> slice:
    """Tokens of sequence `index` in a varlen tensor."""
    start, end = _given(cu_seqlens)[index : index + 2].tolist()
    return slice(start, end)


def _varlen_sequence(problem: Problem, inputs: Inputs, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of one sequence of a varlen call; with pages, k and v are positions 0 to seqlen_k - 1 of its pages."""
    q = inputs.q[_varlen_tokens(inputs.cu_seqlens_q, index)]
    tokens = _varlen_tokens(inputs.cu_seqlens_k, index)
    if not problem.is_paged:
        return q, inputs.k[tokens], inputs.v[tokens]
    positions = torch.arange(tokens.stop - tokens.start, device=problem.device)
    return q, *_cached_tokens(problem, inputs, _cache_index(problem, inputs, index, positions))


def _kvcache_sequence(problem: Problem, inputs: Inputs, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of one sequence of a cache that already holds the new tokens.

    Its keys are the positions cache_leftpad to cache_seqlens + seqlen_new - 1. From here on they are counted from 0, so
    that masks, ALiBi and bias know nothing of the padding.
    """
    start = 0 if inputs.cache_leftpad is None else int(inputs.cache_leftpad[index])
    end = int(_given(inputs.cache_seqlens)[index]) + problem.seqlen_new
    where = _cache_index(problem, inputs, index, torch.arange(start, end, device=problem.device))
    return inputs.q[index], *_cached_tokens(problem, inputs, where)


def _cached_tokens(problem: Problem, inputs: Inputs, where: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values at these places, dequantized if they are stored so."""
    k, v = inputs.k[where], inputs.v[where]
    if problem.cache_dtype is not None:  # exactly: stored values and scales have 32 significant bits together
        k = k.double() * _given(inputs.k_scale)[where].double().unsqueeze(-1)
        v = v.double() * _given(inputs.v_scale)[where].double().unsqueeze(-1)
    return k, v


def _cache_index(problem: Problem, inputs: Inputs, index: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Indices of the first two axes of a cache: where the given positions of sequence `index` lie.

    Pages: position p is slot p % page_block_size of page block_table[index, p // page_block_size].
    Dense: position p of row cache_batch_idx[index], or of row `index` without cache_batch_idx.
    """
    if problem.page_block_size is not None:
        pages = _given(inputs.block_table)[index, positions // problem.page_block_size]
        return pages.long(), positions % problem.page_block_size
    row = index if inputs.cache_batch_idx is None else int(inputs.cache_batch_idx[index])
    return torch.full_like(positions, row), positions


def _attend(
    problem: Problem, sequence: _Sequence, sinks: Tensor | None, precision: _Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of one sequence.

    Returns out (seqlen_q, nheads, headdim_v), lse (nheads, seqlen_q) and the softmax weights before dropout
    (nheads, seqlen_q, seqlen_k).
    """
    if problem.qk_dtype is not None:
        sequence = _multiplied_as(problem.qk_dtype, sequence)
    q = sequence.q.to(precision.matmul).transpose(0, 1)  # (nheads, seqlen_q, headdim)
    # Query head h reads key/value head h // group_size.
    k, v = (
        tensor.to(precision.matmul).transpose(0, 1).repeat_interleave(problem.group_size, dim=0)
        for tensor in (sequence.k, sequence.v)
    )
    scores = (q @ k.transpose(-1, -2)).to(precision.softmax) * problem.softmax_scale
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)

    # Bottom-right alignment: the last query stands at the last key, wherever the two begin.
    seqlen_q, seqlen_k = scores.shape[-2:]
    diagonal = torch.arange(seqlen_q, device=q.device) + seqlen_k - seqlen_q
    distance = torch.arange(seqlen_k, device=q.device) - diagonal[:, None]  # (seqlen_q, seqlen_k), 0 on the diagonal
    if sequence.alibi_slopes is not None:
        scores = scores - sequence.alibi_slopes.to(precision.softmax)[:, None, None] * distance.abs()
    if sequence.bias is not None:
        scores = scores + sequence.bias.to(precision.softmax)
    scores = scores.masked_fill(_hidden_keys(problem, distance), -torch.inf)
    if sequence.kept is not None:
        scores = scores.masked_fill(~sequence.kept, -torch.inf)

    weights, lse = _softmax(scores, sinks)
    kept = weights
    if sequence.keep is not None:
        kept = torch.where(sequence.keep, weights, 0.0) / (1.0 - problem.dropout_p)
    out = kept.to(precision.matmul) @ v
    return out.transpose(0, 1), lse, weights


def _multiplied_as(qk_dtype: torch.dtype, sequence: _Sequence) -> _Sequence:
    """The sequence with dequantized queries and keys: q . k becomes stored_q . stored_k + q . mean.

    The last product is not quantized. One more element of each query, which meets a 1 in each key, adds it.
    """
    *stored_keys, mean = quantize_keys(sequence.k, qk_dtype)
    of_mean = sequence.q.double() * mean.double().repeat_interleave(sequence.q.shape[1] // len(mean), dim=0)
    q, k = (dequantize(*x).double() for x in (quantize(sequence.q, qk_dtype), stored_keys))
    return sequence._replace(
        q=torch.cat((q, of_mean.sum(dim=-1, keepdim=True)), dim=-1),
        k=torch.nn.functional.pad(k, (0, 1), value=1.0),
    )


def _hidden_keys(problem: Problem, distance: Tensor) -> Tensor:
    """True where the causal mask or the window hides a key.

    distance: how far the key lies to the right of the query's diagonal
    """
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if problem.window_left != -1:
        hidden |= distance < -problem.window_left
    if problem.window_right != -1:
        hidden |= distance > problem.window_right
    return hidden


def _kept_keys(problem: Problem, inputs: Inputs, index: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The block mask of a sequence, token by token: bool (nheads, seqlen_q, seqlen_k)."""
    assert problem.block_size is not None
    block_m, block_n = problem.block_size
    by_query = _given(inputs.block_mask)[index].repeat_interleave(block_m, dim=1)[:, :seqlen_q]
    kept = by_query.repeat_interleave(block_n, dim=2)[:, :, :seqlen_k]
    if inputs.tile_index is not None:
        rows, keys = (torch.arange(n, device=kept.device) for n in (seqlen_q, seqlen_k))
        tiles = inputs.tile_index[index : index + 1]
        kept = kept & visible_pairs(tiles, _given(inputs.tile_bits), rows, keys)[0]
    return kept


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights, shaped like scores (nheads, seqlen_q, seqlen_k), and lse (nheads, seqlen_q)."""
    nheads, seqlen_q, seqlen_k = scores.shape
    if sinks is not None:
        # A sink is one more key of every row whose value is zero: it takes weight away and adds nothing.
        sink_scores = sinks.to(scores.dtype)[:, None, None].expand(nheads, seqlen_q, 1)
        scores = torch.cat((scores, sink_scores), dim=-1)
    # The softmax over no keys is 0 / 0. By definition such a row has weights 0, hence out 0, and lse log(0). Its scores
    # are set to 0 first, so that neither the softmax nor its gradient ever sees a row of nothing but -inf.
    no_keys = scores.isneginf().all(dim=-1, keepdim=True)
    scores = scores.masked_fill(no_keys, 0.0)
    weights = torch.softmax(scores, dim=-1).masked_fill(no_keys, 0.0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(no_keys.squeeze(-1), -torch.inf)
    return weights[..., :seqlen_k], lse


def _given(tensor: Tensor | None) -> Tensor:
    """An optional tensor that this kind of call has; validation made sure."""
    assert tensor is not None
    return tensor
