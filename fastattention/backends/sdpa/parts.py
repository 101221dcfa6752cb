"""Parts: the sequences of a call grouped by length, because torch's attention takes equal lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.backends.common.results import keyless
from fastattention.quantized import dequantize


class Part(NamedTuple):
    """Sequences of one length, heads before tokens as torch wants them."""

    q: Tensor  # (batch_size, nheads, seqlen_q, headdim)
    k: Tensor  # (batch_size, nheads_k, seqlen_k, headdim)
    v: Tensor  # (batch_size, nheads_k, seqlen_k, headdim_v)
    slopes: Tensor | None  # float32 (1 or batch_size, nheads, 1, 1)
    bias: Tensor | None  # (batch_size, nheads, seqlen_q, seqlen_k)
    sinks: Tensor | None  # float32 (nheads,)
    blocks: Tensor | None  # bool (batch_size, nheads, rows, columns): the block mask, maybe longer than the sequences
    tiles: tuple[Tensor, Tensor] | None  # tile_index of these sequences, and tile_bits
    first: int  # index in the batch of its first sequence


def fold_groups(x: Tensor, nheads_k: int) -> Tensor:
    """(batch_size, nheads, rows, n) to (batch_size, nheads_k, nheads / nheads_k * rows, n).

    The query heads of a group become rows of the key/value head they share, so that no key is copied for them.
    """
    batch_size, nheads, rows, n = x.shape
    return x.reshape(batch_size, nheads_k, nheads // nheads_k * rows, n)


def unfold_groups(x: Tensor, group_size: int) -> Tensor:
    """The inverse of fold_groups."""
    batch_size, nheads_k, rows, n = x.shape
    return x.reshape(batch_size, nheads_k * group_size, rows // group_size, n)


def split(problem: Problem, inputs: Inputs, q: Tensor, whole_batch: bool) -> Iterator[Part]:
    """The parts of a call, views wherever the layout allows it.

    q: inputs.q, after rotary embedding if there is any
    whole_batch: take a dense batch as one part instead of sequence by sequence
    """
    if problem.layout is Layout.VARLEN:
        return _varlen(problem, inputs)
    if problem.layout is Layout.KVCACHE:
        return _cached(problem, inputs, q)
    return _dense(problem, inputs, whole_batch)


def join(problem: Problem, inputs: Inputs, results: Sequence[AttentionOutput]) -> AttentionOutput:
    """Results of all parts, whose tensors have heads before tokens, in the layout of the call.

    Rows after the last sequence of a varlen call see no keys.
    """
    if not results:
        return _nothing(problem, inputs)
    varlen = problem.layout is Layout.VARLEN
    out = _concatenate([result.out for result in results], 2 if varlen else 0).transpose(1, 2)
    lses = [result.lse for result in results if result.lse is not None]
    lse = _concatenate(lses, 2 if varlen else 0) if lses else None
    if varlen:
        out, lse = out[0], None if lse is None else lse[0]
        if (written := out.shape[0]) < problem.total_q:
            behind = keyless(problem, inputs)
            out = torch.cat([out, behind.out[written:]])
            lse = None if lse is None or behind.lse is None else torch.cat([lse, behind.lse[:, written:]], dim=1)
    masks = [_pad_to(result.dropout_mask, problem) for result in results if result.dropout_mask is not None]
    return AttentionOutput(
        out.contiguous(), None if lse is None else lse.contiguous(), _concatenate(masks, 0) if masks else None
    )


def _nothing(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """The result of an empty batch: no row sees a key, but out is part of autograd's graph of q."""
    out = inputs.q[..., :0].sum(-1, keepdim=True).expand(problem.out_shape).contiguous()
    return AttentionOutput(out, keyless(problem, inputs).lse)


def _dense(problem: Problem, inputs: Inputs, whole_batch: bool) -> Iterator[Part]:
    if whole_batch and problem.batch_size:  # slices would take longer than attention of a short call
        yield _part(inputs, slice(0, problem.batch_size), inputs.q, inputs.k, inputs.v, inputs.attn_bias)
        return
    for index in range(problem.batch_size):
        sequences = slice(index, index + 1)
        bias = None if inputs.attn_bias is None else inputs.attn_bias[sequences]
        yield _part(inputs, sequences, inputs.q[sequences], inputs.k[sequences], inputs.v[sequences], bias)


def _varlen(problem: Problem, inputs: Inputs) -> Iterator[Part]:
    assert inputs.cu_seqlens_q is not None
    assert inputs.cu_seqlens_k is not None
    offsets_q, offsets_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for index in range(problem.batch_size):
        begin_q, end_q = offsets_q[index : index + 2]
        begin_k, end_k = offsets_k[index : index + 2]
        if problem.is_paged:
            k, v = (
                _cached_tokens(pages, scale, inputs, index, 0, 0, end_k - begin_k)
                for pages, scale in ((inputs.k, inputs.k_scale), (inputs.v, inputs.v_scale))
            )
        else:
            k, v = inputs.k[begin_k:end_k], inputs.v[begin_k:end_k]
        bias = None if inputs.attn_bias is None else inputs.attn_bias[None, :, begin_q:end_q, : end_k - begin_k]
        yield _part(inputs, slice(index, index + 1), inputs.q[None, begin_q:end_q], k[None], v[None], bias)


def _cached(problem: Problem, inputs: Inputs, q: Tensor) -> Iterator[Part]:
    assert inputs.cache_seqlens is not None
    ends = (inputs.cache_seqlens + problem.seqlen_new).tolist()
    begins = [0] * len(ends) if inputs.cache_leftpad is None else inputs.cache_leftpad.tolist()
    rows = list(range(len(ends))) if inputs.cache_batch_idx is None else inputs.cache_batch_idx.tolist()
    for index, (begin, end, row) in enumerate(zip(begins, ends, rows, strict=True)):
        sequence = slice(index, index + 1)
        k = _cached_tokens(inputs.k, inputs.k_scale, inputs, index, row, begin, end)
        v = _cached_tokens(inputs.v, inputs.v_scale, inputs, index, row, begin, end)
        bias = None if inputs.attn_bias is None else inputs.attn_bias[sequence, :, :, : end - begin]
        yield _part(inputs, sequence, q[sequence], k[None], v[None], bias)


def _cached_tokens(
    cache: Tensor, scale: Tensor | None, inputs: Inputs, index: int, row: int, begin: int, end: int
) -> Tensor:
    """Tokens begin to end - 1 of sequence `index`, in `row` of a dense cache or in its pages; dequantized."""

    def read(x: Tensor) -> Tensor:
        return x[row, begin:end] if inputs.block_table is None else _from_pages(x, inputs, index, begin, end)

    return read(cache) if scale is None else dequantize(read(cache), read(scale))


def _from_pages(pages: Tensor, inputs: Inputs, index: int, begin: int, end: int) -> Tensor:
    """Tokens begin to end - 1 of sequence `index`, copied from its pages: (end - begin, nheads_k, ...)."""
    assert inputs.block_table is not None
    page_block_size = pages.shape[1]
    if begin == end:
        return pages.flatten(0, 1)[:0]
    first = begin // page_block_size
    used = inputs.block_table[index, first : -(-end // page_block_size)].long()
    return pages[used].flatten(0, 1)[begin - first * page_block_size : end - first * page_block_size]


def _part(inputs: Inputs, sequences: slice, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Part:
    """A Part from tensors with tokens before heads; `sequences` are its indices in the batch."""
    slopes = inputs.alibi_slopes
    if slopes is not None:
        slopes = (slopes[sequences] if slopes.dim() == 2 else slopes.unsqueeze(0))[:, :, None, None]
    blocks = None if inputs.block_mask is None else inputs.block_mask[sequences]
    tiles = None
    if inputs.tile_index is not None and inputs.tile_bits is not None:
        tiles = inputs.tile_index[sequences], inputs.tile_bits
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Part(q, k, v, slopes, bias, inputs.sinks, blocks, tiles, sequences.start)


def aligned(x: Tensor) -> Tensor:
    """`x`, or a copy where torch's GPU kernels would refuse it or fault."""
    return (
        x
        if x.data_ptr() % 16 == 0 and _keep_aligned(x.element_size(), x.stride())
        else x.clone(memory_format=torch.contiguous_format)
    )


def are_aligned(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `aligned` copies none of them, by a cached look-up."""
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    return addresses % 16 == 0 and _keep_aligned(q.element_size(), q.stride(), k.stride(), v.stride())


@functools.lru_cache(maxsize=4096)
def _keep_aligned(itemsize: int, *strides: tuple[int, ...]) -> bool:
    """Whether rows of tensors are contiguous, and all are 16-byte aligned where the first row is."""
    return all(last == 1 and all(stride * itemsize % 16 == 0 for stride in outer) for *outer, last in strides)


def _concatenate(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _pad_to(mask: Tensor, problem: Problem) -> Tensor:
    """A part's dropout mask with zeros up to (seqlen_q, seqlen_k) of the whole call."""
    return F.pad(mask, (0, problem.seqlen_k - mask.shape[3], 0, problem.seqlen_q - mask.shape[2]))
