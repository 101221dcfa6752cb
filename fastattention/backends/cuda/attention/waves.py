"""In which order the CTAs of a launch start: which heads come together."""

from __future__ import annotations

from typing import NamedTuple

from fastattention.attention.problem import Problem
from fastattention.backends.cuda.attention.config import AttentionConfig
from fastattention.gpu_runtime.chips import Limits

# CTAs that start together at the end, as a multiple of those that run at once. Under a causal mask a head's first tile
# takes twice the average time. When it starts, shorter ones must remain for all other multiprocessors until it ends.
_LAST_WAVE = 2


class Waves(NamedTuple):
    """The tiles of a head, and the heads whose tiles start together (find_work in kernels/work.cuh).

    heads_per_wave: heads whose keys and values stay in the L2 cache together
    heads_before_last: heads that start so. All others start together after them.
    """

    num_m_tiles: int
    heads_per_wave: int = 0
    heads_before_last: int = 0


NO_WAVES = Waves(0)  # of a launch without tiles


def choose_waves(
    problem: Problem, config: AttentionConfig, rows: int, heads: int, tokens: int, limits: Limits
) -> Waves:
    """The waves of a launch.

    Those that share keys and values fill an eighth of the L2 cache, or share one key head. CTAs of one such group of
    heads still run when those of the next two begin, queries and results pass through the cache too, and an H100 keeps
    a copy of what it reads in each half of it. Heads that share a key head stay together, and groups have as many each
    time, so that the last ones fill the GPU too.

    rows, heads: of a sequence, in the launch
    tokens: those of keys and values, or of other tiles, that a head reads
    """
    key_head_bytes = tokens * (problem.headdim + problem.headdim_v) * 2
    most = max(1, limits.l2_bytes // 8 // max(key_head_bytes, 1))
    key_heads = max(1, problem.nheads_k * problem.batch_size)
    num_waves = -(-key_heads // most)
    heads_per_wave = -(-key_heads // num_waves) * heads // problem.nheads_k
    num_m_tiles = -(-rows // config.tile_m)
    last = 1
    if problem.has_window and num_m_tiles:
        last = -(-_LAST_WAVE * resident_ctas(config, limits) // (num_m_tiles * config.num_value_parts))
    before_last = max(0, problem.batch_size * heads - last) // heads_per_wave * heads_per_wave
    return Waves(num_m_tiles, heads_per_wave, before_last)


def resident_ctas(config: AttentionConfig, limits: Limits) -> int:
    """CTAs that run at once."""
    return config.min_ctas * limits.num_sms
