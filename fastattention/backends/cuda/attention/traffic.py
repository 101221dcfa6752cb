"""How often the kernels read keys and values from main memory. docs/internals/traffic.md has the model."""

from __future__ import annotations

from fastattention.attention.problem import Problem
from fastattention.backends.common.traffic import Extent, mask_of, token_bytes, visible_keys
from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.backends.cuda.attention.launches import Launches
from fastattention.gpu_runtime.chips import Limits


def tiled_keys(problem: Problem, extent: Extent, launches: Launches, limits: Limits) -> int:
    """Tokens of k and v of all sequences that are read from main memory, counted every time.

    A decode reads each key that a query sees once: the CTAs that share it run side by side (kernels/schedule.cuh). The
    forward kernel runs in waves of as many CTAs as the GPU holds.
    """
    if launches.split is None and launches.attention:
        return sum(
            count * _keys_of_waves(problem, extent, launches, limits, *lengths)
            for lengths, count in extent.lengths.items()
        )
    return sum(count * visible_keys(mask_of(problem, *lengths)) for lengths, count in extent.lengths.items())


def resident_ctas(config: KernelConfig, limits: Limits) -> int:
    """CTAs that run at once."""
    return config.min_ctas * limits.num_sms


def _keys_of_waves(
    problem: Problem, extent: Extent, launches: Launches, limits: Limits, seqlen_q: int, seqlen_k: int
) -> int:
    """Tokens that are read for one sequence and key head.

    The tiles of heads_per_l2_wave heads start together, those of the last rows first (kernels/work.cuh). A wave is as
    many of them as the GPU holds. Its CTAs go through the keys in step, so each key that one of them sees is read from
    main memory once. Keys that the wave before has seen too are still in the L2 cache, if all that it saw fits a
    quarter of it: an H100 keeps a copy in each half, and queries and results take half of the rest.
    """
    config = launches.attention[0].variant
    assert isinstance(config, KernelConfig)
    heads = min(launches.heads_per_l2_wave, problem.batch_size * problem.nheads)
    ctas_of_tile = heads * config.num_value_parts
    resident, num_tiles = resident_ctas(config, limits), -(-seqlen_q // config.tile_m)
    key_bytes = token_bytes(problem, extent) * heads // problem.nheads  # of a token, in the heads of a wave
    mask = mask_of(problem, seqlen_q, seqlen_k)
    keys, first_kept = 0, seqlen_k
    for cta in range(0, num_tiles * ctas_of_tile, resident):
        past = num_tiles - cta // ctas_of_tile  # the last tile of the wave is before it
        first = max(0, num_tiles - 1 - (cta + resident - 1) // ctas_of_tile)
        begin, end = mask.row_begin(first * config.tile_m), mask.row_end(min(past * config.tile_m, seqlen_q) - 1)
        if end > begin:
            keys += min(end, first_kept) - begin
            first_kept = begin if (end - begin) * key_bytes <= limits.l2_bytes // 4 else seqlen_k
    return keys
