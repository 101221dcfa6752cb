"""Cuts the query rows of a part into chunks, and makes the mask or bias of each chunk."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.attention.mask_tiles import visible_pairs
from fastattention.attention.problem import Problem
from fastattention.backends.common.tile_range import TileKind, TileRange
from fastattention.backends.sdpa.parts import Part

# Elements of one chunk's score matrix: 32 MiB in float32. A few such temporaries fit any machine, and matrix products
# of this size run at full speed.
CHUNK_ELEMENTS = 2**23
# Rows of a chunk when the mask is a band: fewer rows skip more keys, more rows make larger products.
BAND_ROWS = 512


class Chunk(NamedTuple):
    """Query rows of a part and the keys that any of them sees."""

    rows: slice
    keys: slice


class Mask(NamedTuple):
    """What happens to a chunk's scores before the softmax."""

    visible: Tensor | None  # bool (rows, keys), or with a block mask as below; None when every row sees every key
    added: Tensor | None  # (1 or batch_size, 1 or nheads, rows, keys): ALiBi and bias; None without


def band(problem: Problem, part: Part) -> TileRange:
    """The keys that the causal mask and the window leave to each query of `part`."""
    return TileRange(part.q.shape[2], part.k.shape[2], problem.window_left, problem.window_right)


def sees_everything(problem: Problem, part: Part) -> bool:
    """True when the causal mask and the window hide no key of `part` from any of its queries."""
    return hides_nothing(part.q.shape[2], part.k.shape[2], problem.window_left, problem.window_right)


@functools.lru_cache(maxsize=4096)
def hides_nothing(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int) -> bool:
    """True when a window hides no key of seqlen_k keys from any of seqlen_q queries."""
    if not seqlen_q or not seqlen_k:
        return True
    band = TileRange(seqlen_q, seqlen_k, window_left, window_right)
    return band.classify(0, seqlen_q - 1, 0, seqlen_k - 1) is TileKind.FULL


def chunks(problem: Problem, part: Part, elements_per_row: int) -> Iterator[Chunk]:
    """Chunks of at most CHUNK_ELEMENTS scores, in order of their rows; at least one, even when there are no rows."""
    seqlen_q = part.q.shape[2]
    ranges = band(problem, part)
    step = max(1, CHUNK_ELEMENTS // max(1, elements_per_row))
    if problem.has_window:
        step = min(step, BAND_ROWS)
    for start in range(0, max(1, seqlen_q), step):
        stop = min(start + step, seqlen_q)
        begin, end = ranges.row_begin(start), ranges.row_end(stop - 1)
        yield Chunk(slice(start, stop), slice(begin, max(begin, end)))


def chunk_mask(problem: Problem, part: Part, chunk: Chunk) -> Mask:
    """The mask of a chunk, built for its rows and keys only."""
    shift = part.k.shape[2] - part.q.shape[2]
    rows = torch.arange(chunk.rows.start, chunk.rows.stop, device=part.q.device).unsqueeze(1) + shift
    keys = torch.arange(chunk.keys.start, chunk.keys.stop, device=part.q.device)
    distance = keys - rows  # (rows, keys), 0 on the diagonal
    visible = None
    if problem.window_left >= 0:
        visible = distance >= -problem.window_left
    if problem.window_right >= 0:
        right = distance <= problem.window_right
        visible = right if visible is None else visible & right
    if problem.block_size is not None and part.blocks is not None:
        block_m, block_n = problem.block_size
        kept = part.blocks[:, :, (rows.squeeze(1) - shift) // block_m][..., keys // block_n]
        visible = kept if visible is None else visible & kept
    if part.tiles is not None:
        shown = visible_pairs(*part.tiles, rows.squeeze(1) - shift, keys)
        visible = shown if visible is None else visible & shown
    added = None
    if part.slopes is not None:
        added = -part.slopes * distance.abs()
    if part.bias is not None:
        bias = part.bias[:, :, chunk.rows, chunk.keys]
        added = bias if added is None else added + bias
    return Mask(visible, added)
