"""How often the kernels read keys and values from main memory. docs/internals/traffic.md has the model."""

from __future__ import annotations

from fastattention.attention.problem import Problem
from fastattention.backends.common.tile_range import TileRange
from fastattention.backends.common.traffic import Extent, mask_of, token_bytes, visible_keys
from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.backends.cuda.attention.launches import Launches
from fastattention.backends.cuda.attention.waves import resident_ctas
from fastattention.gpu_runtime.chips import Limits


def tiled_keys(problem: Problem, extent: Extent, launches: Launches, limits: Limits) -> int:
    """Tokens of k and v of all sequences that are read from main memory, counted every time.

    A decode reads each key that a query sees once: the CTAs that share it run side by side (kernels/schedule.cuh). The
    forward kernel runs in waves of as many CTAs as the GPU holds.
    """
    if launches.split is None and launches.attention:
        return sum(
            count * _keys_of_sequence(problem, extent, launches, limits, mask_of(problem, *lengths))
            for lengths, count in extent.lengths.items()
        )
    return sum(count * visible_keys(mask_of(problem, *lengths)) for lengths, count in extent.lengths.items())


def _keys_of_sequence(problem: Problem, extent: Extent, launches: Launches, limits: Limits, mask: TileRange) -> int:
    """Tokens that are read for one sequence and key head, as a mean over all of them."""
    heads, before_last = problem.batch_size * problem.nheads, launches.waves.heads_before_last
    keys = 0
    for count, together in (before_last, launches.waves.heads_per_wave), (heads - before_last, heads - before_last):
        keys += count * _keys_of_waves(problem, extent, launches, limits, mask, together)
    return keys // heads


def _keys_of_waves(
    problem: Problem, extent: Extent, launches: Launches, limits: Limits, mask: TileRange, heads: int
) -> int:
    """Tokens that are read for a sequence and a key head, whose tiles start together with those of `heads` query heads.

    Tiles of the last rows start first (kernels/work.cuh). A wave is as many of all tiles as the GPU holds. Its CTAs go
    through the keys in step, so each key that one of them sees is read from main memory once. Keys that the wave before
    has seen too are still in the L2 cache, if all that it saw fits a quarter of it: an H100 keeps a copy in each half,
    and queries and results take half of the rest.
    """
    config = launches.attention[0].variant
    assert isinstance(config, KernelConfig)
    ctas_of_tile = heads * config.num_value_parts
    resident, num_tiles = resident_ctas(config, limits), -(-mask.seqlen_q // config.tile_m)
    key_bytes = token_bytes(problem, extent) * heads // problem.nheads  # of a token, in the heads of a wave
    keys, first_kept = 0, mask.seqlen_k
    for cta in range(0, num_tiles * ctas_of_tile, resident):
        past = num_tiles - cta // ctas_of_tile  # the last tile of the wave is before it
        first = max(0, num_tiles - 1 - (cta + resident - 1) // ctas_of_tile)
        begin, end = mask.row_begin(first * config.tile_m), mask.row_end(min(past * config.tile_m, mask.seqlen_q) - 1)
        if end > begin:
            keys += min(end, first_kept) - begin
            first_kept = begin if (end - begin) * key_bytes <= limits.l2_bytes // 4 else mask.seqlen_k
    return keys
