"""Main-memory traffic of a call: of its kernels, of standard attention, and a lower bound for any algorithm.

Slopes, sinks, lengths and block tables are left out: they are small. docs/internals/traffic.md has the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from fastattention.attention.problem import Inputs, Layout, Problem
from fastattention.backends.common.tile_range import TileRange
from fastattention.engine.explain import Bytes, Traffic

_SMALL = frozenset({"alibi_slopes", "sinks", "dropout_p", "softcap"})  # arguments that move next to no memory


class Extent(NamedTuple):
    """What a Problem does not say about the memory of its call."""

    lengths: Mapping[tuple[int, int], int]  # (seqlen_q, seqlen_k), appended keys included -> sequences that have them
    values_in_keys: bool = False  # v is the first columns of k, in the same memory

    @staticmethod
    def of(problem: Problem, inputs: Inputs) -> Extent:
        """Reads lengths, which waits for the device that holds them."""
        values_in_keys = inputs.k.data_ptr() == inputs.v.data_ptr() and inputs.k.stride() == inputs.v.stride()
        if problem.layout is Layout.VARLEN:
            assert inputs.cu_seqlens_q is not None
            assert inputs.cu_seqlens_k is not None
            pairs = zip(inputs.cu_seqlens_q.diff().tolist(), inputs.cu_seqlens_k.diff().tolist(), strict=True)
            return Extent(Counter(pairs), values_in_keys)
        if problem.layout is Layout.DENSE:
            return Extent({(problem.seqlen_q, problem.seqlen_k): problem.batch_size}, values_in_keys)
        assert inputs.cache_seqlens is not None
        keys = inputs.cache_seqlens + problem.seqlen_new
        if inputs.cache_leftpad is not None:
            keys = keys - inputs.cache_leftpad
        seqlens = keys.clamp(0, problem.seqlen_k).tolist()
        return Extent(Counter((problem.seqlen_q, seqlen) for seqlen in seqlens), values_in_keys)


def is_modelled(problem: Problem) -> bool:
    """Whether the traffic of a call is modelled.

    It is not with attn_bias, whose memory may be shared by heads and rows, with block_mask, on whose values it depends,
    or with qk_dtype, which writes queries and keys once more.
    """
    return _SMALL.issuperset(problem.score_arguments)


def traffic_of(
    problem: Problem, extent: Extent, backend: str, tiled_keys: int | None, fast_bytes: int | None
) -> Traffic:
    """The traffic of a call that `is_modelled`.

    tiled_keys: tokens of k and v that are read from main memory, counted every time; None if not known
    fast_bytes: bytes of on-chip memory; None if not known
    """
    seen = sum(count * visible_keys(mask_of(problem, *lengths)) for lengths, count in extent.lengths.items())
    pairs = sum(count * q * k for (q, k), count in extent.lengths.items())
    scores = 2 * pairs * problem.nheads * problem.dtype.itemsize  # S and P
    once = _moved(problem, extent, sum(count * k for (_, k), count in extent.lengths.items()))
    return Traffic(
        backend,
        tiled=None if tiled_keys is None else _moved(problem, extent, tiled_keys),
        compulsory=_moved(problem, extent, seen),
        standard=Bytes(once.read + scores, once.written + scores),
        io_bound=None if fast_bytes is None else io_bound(problem, extent, fast_bytes),
    )


def mask_of(problem: Problem, seqlen_q: int, seqlen_k: int) -> TileRange:
    """The mask of a sequence."""
    return TileRange(seqlen_q, seqlen_k, problem.window_left, problem.window_right)


def visible_keys(mask: TileRange) -> int:
    """Keys that some query sees."""
    return max(0, mask.row_end(mask.seqlen_q - 1) - mask.row_begin(0)) if mask.seqlen_q else 0


def token_bytes(problem: Problem, extent: Extent) -> int:
    """Bytes of a token of k and v, with all key heads, as stored."""
    columns = problem.headdim + (0 if extent.values_in_keys else problem.headdim_v)
    if problem.cache_dtype is None:
        return problem.nheads_k * columns * problem.dtype.itemsize
    return problem.nheads_k * (columns * problem.cache_dtype.itemsize + 2 * 4)  # float32 scales of key and value


def io_bound(problem: Problem, extent: Extent, fast_bytes: int) -> int:
    """N^2 d^2 / M words of the dtype of q, in bytes, for M words of fast memory.

    Saha and Ye, "The I/O Complexity of Attention, or How Optimal is FlashAttention?" (2024), prove Omega(N^2 d^2 / M)
    for M >= d^2, which every GPU has. The constant factor is not known, and is 1 here. They prove it for one head
    without a mask: we count N^2 as the pairs of a query and a key that it sees, of all query heads, and d^2 as
    headdim * headdim_v.
    """
    pairs = sum(count * _visible_pairs(mask_of(problem, *lengths)) for lengths, count in extent.lengths.items())
    products = pairs * problem.nheads * problem.headdim * problem.headdim_v
    return products * problem.dtype.itemsize**2 // fast_bytes


def _moved(problem: Problem, extent: Extent, keys: int) -> Bytes:
    """Bytes when q is read once and out written once, and `keys` tokens of k and v are read.

    Tokens that the call appends are counted as read from k and v, and not again from the cache.
    """
    itemsize, query_rows = problem.dtype.itemsize, problem.total_q * problem.nheads
    appended = problem.batch_size * problem.seqlen_new
    new = appended * problem.nheads_k * (problem.headdim + problem.headdim_v) * itemsize
    cached = max(0, keys - appended) * token_bytes(problem, extent)
    out = query_rows * problem.headdim_v * itemsize + 4 * query_rows * problem.return_lse
    return Bytes(query_rows * problem.headdim * itemsize + new + cached, out + appended * token_bytes(problem, extent))


def _visible_pairs(mask: TileRange) -> int:
    """Pairs of a query and a key that it sees: the ends of all rows less their beginnings."""
    diagonal = mask.seqlen_k - mask.seqlen_q

    def sum_of_rows(first: int) -> int:
        """Sum over all rows of row + first, clamped to 0 and seqlen_k."""
        return up_to(first + mask.seqlen_q - 1) - up_to(first - 1)

    def up_to(last: int) -> int:
        """Sum of 0 to last, each clamped to seqlen_k."""
        inside = max(0, min(last, mask.seqlen_k))
        return inside * (inside + 1) // 2 + max(0, last - mask.seqlen_k) * mask.seqlen_k

    ends = mask.seqlen_q * mask.seqlen_k if mask.right < 0 else sum_of_rows(diagonal + mask.right + 1)
    return ends - (0 if mask.left < 0 else sum_of_rows(diagonal - mask.left))
