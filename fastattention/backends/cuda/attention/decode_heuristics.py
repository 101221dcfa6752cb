"""Chooses the variant of the decode kernel and its split of the keys. Pure Python.

A decode takes all query heads that share a key head as rows of one tile, and shares out the keys of all sequences among
CTAs (kernels/schedule.cuh). Sequences with many queries fill the GPU without that: they go to the forward kernel.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from fastattention.attention.problem import MAX_HEADDIM, Layout, Problem
from fastattention.backends.cuda.attention.config import CACHE_FORMATS, WIDEST_OF_A_WARP, KernelConfig
from fastattention.backends.cuda.attention.heuristics import (
    fields_of,
    first_that_fits,
    padded_headdims,
    score_rules,
    tiles_for,
)
from fastattention.gpu_runtime.chips import Limits

# Least keys of a sequence without a cache (docs/decisions/0030-decode-few-queries-of-dense-calls.md).
_LEAST_KEYS, _LEAST_KEYS_OF_MANY_ROWS, _LEAST_KEYS_OF_A_QUERY = 256, 1024, 4
# Typical rows of tiles of the forward and the decode kernel. Two CTAs of the forward kernel run a multiprocessor at
# full speed. One alone, and the decode kernel, reach the shares below.
_FORWARD_TILE, _DECODE_TILE = 128, 64
_SPEED_OF_ONE_CTA, _SPEED_OF_DECODE = 0.79, 0.75
_MAX_WAVES = 4
_MAX_ROWS_IN_PLACE = 16  # merging more of them in a CTA takes longer than launching another kernel
_MAX_NUMBERS_IN_PLACE = 16 * 256  # the same limit for elements of all these rows
_ENOUGH_USED = 0.9  # share of the best utilization of the GPU that is good enough


class _Few(NamedTuple):
    """Limits of calls for which a tile is meant."""

    keys: int  # keys of all heads, for each multiprocessor
    nheads_k: int
    paged: bool  # looking up pages takes more warps


class _Tiles(NamedTuple):
    tile_m: int  # rows; the tile suits calls with as many
    tile_n: int
    num_warps: int
    num_stages: int
    min_ctas: int
    queries_in_registers: bool
    split_keys_across_warps: bool
    num_value_parts: int = 1
    few: _Few | None = None
    quantized: bool = False  # whether the tile is for quantized caches, which need more warps for less memory
    column_warps: int = 1


# Candidates for head dimensions up to the key, best first. Tiles with the fewest rows that hold the rows of the call
# are considered, or the largest if none does. The first that fits the GPU is taken
# (docs/decisions/0025-swizzle-decode-copies-and-hint-128-bytes.md, and for quantized caches
# docs/decisions/0029-decode-quantized-caches-with-eight-warps.md).
_TILES: dict[int, dict[int, tuple[_Tiles, ...]]] = {
    80: {
        128: (
            _Tiles(16, 32, 8, 2, 1, True, True, quantized=True),
            _Tiles(16, 32, 4, 2, 2, True, True, quantized=True),
            _Tiles(16, 32, 4, 2, 1, True, True, few=_Few(24576, 16, paged=False)),
            _Tiles(16, 16, 8, 2, 1, True, True, few=_Few(24576, 16, paged=True)),
            _Tiles(16, 16, 4, 2, 2, True, True),
            _Tiles(16, 16, 4, 2, 1, True, True),
            _Tiles(32, 16, 4, 2, 2, False, True),
            _Tiles(32, 16, 4, 2, 1, False, True),
            _Tiles(64, 64, 4, 2, 2, False, False),
            _Tiles(64, 32, 4, 2, 1, False, False),
            _Tiles(128, 64, 8, 2, 1, True, False),
            _Tiles(128, 32, 8, 2, 1, True, False),
        ),
        256: (
            _Tiles(16, 16, 4, 2, 1, False, True),
            _Tiles(16, 16, 2, 2, 1, False, True),
            _Tiles(64, 32, 4, 2, 1, False, False),
            _Tiles(64, 16, 4, 2, 1, False, False),
        ),
        MAX_HEADDIM: (
            _Tiles(16, 64, 4, 2, 1, False, False, quantized=True, column_warps=4),
            _Tiles(16, 32, 2, 2, 1, False, False, quantized=True, column_warps=2),
            _Tiles(16, 32, 4, 2, 1, False, False, column_warps=4),
            _Tiles(16, 32, 4, 1, 1, False, False, column_warps=4),
            _Tiles(64, 64, 8, 2, 1, False, False, quantized=True, column_warps=4),
            _Tiles(64, 64, 8, 1, 1, False, False, column_warps=4),
            _Tiles(64, 32, 8, 1, 1, False, False, column_warps=2),
            _Tiles(64, 16, 4, 1, 1, False, False, 2),
        ),
    },
    75: {
        128: (
            _Tiles(16, 16, 4, 1, 2, True, True),
            _Tiles(16, 16, 4, 1, 1, True, True),
            _Tiles(64, 32, 4, 1, 2, False, False),
            _Tiles(64, 32, 4, 1, 1, False, False),
            _Tiles(128, 32, 8, 1, 1, True, False),
        ),
        256: (_Tiles(16, 16, 2, 1, 1, False, True), _Tiles(64, 16, 4, 1, 1, False, False)),
        MAX_HEADDIM: (_Tiles(32, 16, 2, 1, 1, False, False, 4),),
    },
    70: {
        128: (_Tiles(32, 16, 4, 1, 2, False, True), _Tiles(128, 16, 4, 1, 1, False, False)),
        256: (
            _Tiles(32, 16, 4, 1, 1, False, True, 2),
            _Tiles(32, 16, 2, 1, 1, False, True, 2),
            _Tiles(128, 16, 4, 1, 1, False, False, 2),
        ),
        MAX_HEADDIM: (_Tiles(32, 8, 1, 1, 1, False, False, 4), _Tiles(64, 8, 2, 1, 1, False, False, 4)),
    },
    60: {
        64: (_Tiles(16, 16, 2, 1, 1, False, True), _Tiles(64, 32, 4, 1, 1, False, False)),
        128: (_Tiles(16, 8, 2, 1, 1, False, True), _Tiles(32, 16, 2, 1, 1, False, False)),
        256: (_Tiles(16, 8, 1, 1, 1, False, True),),
        MAX_HEADDIM: (_Tiles(16, 8, 1, 1, 1, False, True, 4),),
    },
}
# The same for values that are the first columns of the keys, with a head dimension above 256
# (docs/decisions/0051-share-value-columns-among-warps-above-headdim-256.md).
_LATENT_TILES: dict[int, tuple[_Tiles, ...]] = {
    80: (
        _Tiles(16, 64, 8, 2, 1, False, False, column_warps=8),
        _Tiles(16, 32, 4, 3, 1, False, False, column_warps=4),
        _Tiles(16, 32, 4, 2, 1, False, False, column_warps=4),
        _Tiles(64, 64, 8, 2, 1, False, False, column_warps=4),
        _Tiles(64, 32, 8, 2, 1, False, False, column_warps=4),
    ),
}


def representative_calls() -> list[tuple[int, int]]:
    """Numbers of rows, and of keys for each multiprocessor: one pair for every choice that depends on them."""
    tiles = [sizes for by_headdim in _TILES.values() for candidates in by_headdim.values() for sizes in candidates]
    limits = {sizes.few.keys for sizes in tiles if sizes.few is not None}
    return list(itertools.product(sorted({sizes.tile_m for sizes in tiles}), [*sorted(limits), max(limits) + 1]))


def num_rows(problem: Problem) -> int:
    """Query rows that share a key head."""
    return problem.seqlen_q * problem.group_size


def is_decode(problem: Problem, limits: Limits) -> bool:
    """Whether the decode kernel serves a problem, rather than the forward kernel."""
    # The decode kernel lacks these features.
    if problem.layout is Layout.VARLEN or problem.dropout_p > 0.0 or problem.block_size or problem.qk_dtype:
        return False
    if problem.cache_dtype is not None:
        return True  # the forward kernel reads no quantized caches
    few_rows = num_rows(problem) <= _MAX_ROWS_IN_PLACE
    if problem.layout is Layout.DENSE:
        of_many = max(_LEAST_KEYS_OF_MANY_ROWS, _LEAST_KEYS_OF_A_QUERY * problem.seqlen_q)
        if problem.seqlen_k < (_LEAST_KEYS if few_rows else of_many):
            return False
    return few_rows or _decodes_faster(problem, limits)


def _decodes_faster(problem: Problem, limits: Limits) -> bool:
    """Compares how long multiprocessors are busy, in tiles of the forward kernel.

    The forward kernel has a CTA for every tile of queries of a head: few CTAs leave multiprocessors idle, and few
    queries leave most of a tile empty. The decode kernel shares out all keys evenly, but is slower.
    """
    ctas = problem.batch_size * problem.nheads * -(-problem.seqlen_q // _FORWARD_TILE)
    forward = 1 / _SPEED_OF_ONE_CTA if ctas <= limits.num_sms else 2 * -(-ctas // (2 * limits.num_sms))
    tiles = problem.batch_size * problem.nheads_k * -(-num_rows(problem) // _DECODE_TILE)
    decode = tiles * _DECODE_TILE / _FORWARD_TILE / limits.num_sms / _SPEED_OF_DECODE
    return decode < forward


def candidates_for(problem: Problem, arch: int, limits: Limits, values_in_keys: bool = False) -> list[KernelConfig]:
    """Kernels for a problem, best first: the smallest tiles that hold all rows; without any, the largest."""
    columns = padded_headdims(problem.headdim, problem.headdim_v)
    values_in_keys = values_in_keys and arch in _LATENT_TILES and max(columns) > WIDEST_OF_A_WARP
    rows, keys = num_rows(problem), problem.batch_size * problem.nheads_k * problem.seqlen_k // limits.num_sms
    quantized = problem.cache_dtype is not None

    def exceeds(few: _Few | None) -> bool:
        return few is not None and (few.paged != problem.is_paged or keys > few.keys or problem.nheads_k > few.nheads_k)

    def demerits(sizes: _Tiles) -> tuple[bool, int, bool, bool]:
        return sizes.tile_m < rows, abs(sizes.tile_m - rows), sizes.quantized != quantized, exceeds(sizes.few)

    return [
        KernelConfig(
            **fields_of(sizes, KernelConfig),
            arch=arch,
            dtype=problem.dtype,  # of the cache, which is read where it lies
            headdim=columns[0],
            headdim_v=columns[1] // sizes.num_value_parts,
            **score_rules(problem),
            paged=problem.is_paged,
            decodes=True,
            cache_format=CACHE_FORMATS[problem.cache_dtype],
            values_in_keys=values_in_keys,
        )
        for sizes in sorted(_LATENT_TILES[arch] if values_in_keys else tiles_for(_TILES[arch], columns), key=demerits)
    ]


def choose_decode(problem: Problem, arch: int, limits: Limits, values_in_keys: bool = False) -> KernelConfig:
    """The configuration for a decode on a GPU. Raises CompileError when none fits."""
    return first_that_fits(candidates_for(problem, arch, limits, values_in_keys), limits)


class Split(NamedTuple):
    """How a decode divides its work, see kernels/schedule.cuh."""

    num_m_tiles: int = 0  # of the query rows that share a key head
    num_units: int = 0  # CTAs of a group: one for each of these tiles and each key head
    num_cta_groups: int = 0  # that share out all keys, or all parts of all sequences where num_splits is set
    num_splits: int = 0  # of each sequence, where the call asked for them; otherwise 0
    num_slots: int = 0  # for partial results; 0 when there are none
    partial_rows: int = 0  # of a slot
    teams_of_row: int = 0  # half warps of the other kernel that share the partial results of a row
    merges_in_place: bool = False  # the last CTA of a unit merges its partial results; otherwise another kernel does

    @property
    def num_counters(self) -> int:
        """Counters of a sequence, by which the CTAs of a unit know which of them is the last."""
        return self.num_units if self.merges_in_place else 0

    @property
    def num_ctas(self) -> int:
        """CTAs of all groups."""
        return self.num_cta_groups * self.num_units


def choose_split(problem: Problem, config: KernelConfig, limits: Limits) -> Split:
    """Uses as many CTAs as the GPU holds at once, unless the call sets num_splits. Only the device knows lengths.

    Pages of one token are the keys that queries have selected, mostly as many for each. Where sequences fill the GPU
    evenly, none is split: merging parts of 128 heads takes a third of the time (decision 0083).
    """
    rows = num_rows(problem)
    num_m_tiles = -(-rows // config.tile_m)
    units, partial_rows = problem.nheads_k * num_m_tiles, min(rows, config.tile_m)
    most_tiles = max(1, -(-problem.seqlen_k // config.stream_tile))  # tiles of the longest sequence
    # A CTA with part of the columns of v has no maxima and sums of its own.
    few = partial_rows <= _MAX_ROWS_IN_PLACE and partial_rows * problem.headdim_v <= _MAX_NUMBERS_IN_PLACE
    in_place = few and config.num_value_parts == 1
    resident, num_splits = config.min_ctas * limits.num_sms, problem.num_splits
    if num_splits == 0 and problem.page_block_size == 1 and _used(problem.batch_size * units, resident) >= _ENOUGH_USED:
        num_splits = 1
    if num_splits > 0:
        num_splits = min(num_splits, most_tiles)
        cta_groups = problem.batch_size * num_splits
        slots = cta_groups * units * (num_splits > 1)
        teams = _teams_of_row(num_splits)
        return Split(num_m_tiles, units, cta_groups, num_splits, slots, partial_rows, teams, slots > 0 and in_place)
    cta_groups = min(_num_cta_groups(units, resident), problem.batch_size * most_tiles)
    slots = 2 * cta_groups * units * (most_tiles > 1)
    teams = _teams_of_row(-(-cta_groups // problem.batch_size) + 1)
    return Split(num_m_tiles, units, cta_groups, 0, slots, partial_rows, teams, slots > 0 and in_place)


def _teams_of_row(num_parts: int) -> int:
    """Half warps of combine.cuh that merge so many partial results of a row. Each reads four at once."""
    return 1 if num_parts <= 4 else 4 if num_parts <= 32 else KernelConfig.combine_teams


def _num_cta_groups(units: int, resident: int) -> int:
    """Groups whose CTAs fill the GPU once, or a few times where units are too many to do so evenly.

    units: CTAs of a group; resident: CTAs that run at once.
    """
    candidates = range(1, max(1, _MAX_WAVES * resident // max(units, 1)) + 1)
    once = max(1, resident // max(units, 1))
    enough = _ENOUGH_USED * max(_used(cta_groups * units, resident) for cta_groups in candidates)
    return next(n for n in itertools.chain([once], candidates) if _used(n * units, resident) >= enough)


def _used(ctas: int, resident: int) -> float:
    """How much of the GPU so many CTAs keep busy, until the last wave ends."""
    return ctas / (-(-ctas // resident) * resident) if ctas else 0.0
