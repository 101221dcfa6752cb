"""Chooses the variant of the forward kernel. Pure Python, no device needed.

`choose_config` maps (Problem, code path, limits of the GPU) to a KernelConfig. decode_heuristics.py does so for few
queries over a cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V, Problem
from fastattention.backends.cuda.attention.config import (
    CACHE_FORMATS,
    WIDEST_OF_A_WARP,
    AttentionConfig,
    KernelConfig,
    why_not_fitting,
)
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import Limits
from fastattention.quantized import KEYS_OF_SCALE

# What a call may have that takes registers, by fields of a configuration.
NOTHING: frozenset[str] = frozenset()
SOFTCAP, ALIBI, DROPOUT = (frozenset((field,)) for field in ("softcaps", "has_alibi", "drops"))
SCORES = SOFTCAP | ALIBI | {"has_bias", "extreme_scores"}
EVERYTHING = SCORES | DROPOUT | {"quantized"}


class _Tiles(NamedTuple):
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    min_ctas: int
    queries_in_registers: bool
    num_value_parts: int = 1
    max_seqlen_q: int | None = None  # calls with more queries prefer another tile
    serves: frozenset[str] = EVERYTHING  # calls with more than this do better with another tile
    column_warps: int = 1


# Candidates for head dimensions up to the key, best first: the first that suits the call and fits the GPU is taken. The
# first candidates of 80 and 75 were chosen on an H200 (docs/decisions/0018-choose-headdim-64-tiles-by-length.md). What
# those of 80 serve was chosen on an H100 (docs/decisions/0073-compile-each-rule-of-scores-on-its-own.md). Those of 70
# were chosen by benchmarks/volta_model (docs/decisions/0022-use-256-row-tiles-on-volta-at-headdim-128.md).
# The others were chosen by counting: as many warps, and as few reads of shared memory, as fit.
_TILES: dict[int, dict[int, tuple[_Tiles, ...]]] = {
    80: {
        64: (
            _Tiles(128, 32, 4, 2, 3, False, max_seqlen_q=8191, serves=NOTHING),
            _Tiles(192, 48, 4, 2, 2, False, serves=NOTHING),
            _Tiles(128, 64, 4, 2, 2, False, serves=SCORES),
            _Tiles(64, 64, 4, 2, 3, True),
            _Tiles(128, 64, 4, 1, 2, False),
            _Tiles(64, 64, 4, 1, 2, True),
        ),
        128: (
            _Tiles(128, 64, 4, 1, 2, False, serves=SCORES),
            _Tiles(64, 64, 4, 1, 2, True),
            _Tiles(128, 64, 8, 1, 1, True),
        ),
        192: (_Tiles(128, 64, 8, 2, 1, True), _Tiles(128, 64, 8, 1, 1, True), _Tiles(64, 32, 4, 1, 1, True)),
        256: (_Tiles(128, 32, 8, 2, 1, True), _Tiles(64, 32, 4, 1, 1, False)),
        MAX_HEADDIM: (
            _Tiles(64, 64, 8, 1, 1, False, column_warps=2),
            _Tiles(64, 32, 8, 1, 1, False, column_warps=2),
            _Tiles(32, 16, 2, 1, 1, False, 2),
        ),
    },
    75: {
        64: (_Tiles(128, 64, 4, 1, 2, False), _Tiles(128, 32, 4, 1, 2, True)),
        128: (_Tiles(128, 32, 4, 1, 2, False), _Tiles(128, 32, 8, 1, 1, True)),
        192: (_Tiles(64, 32, 4, 1, 1, False),),
        256: (_Tiles(64, 16, 4, 1, 1, False),),
        MAX_HEADDIM: (_Tiles(32, 16, 2, 1, 1, False, 4),),
    },
    70: {
        64: (
            _Tiles(64, 32, 2, 1, 2, False, max_seqlen_q=64),
            _Tiles(128, 64, 4, 1, 2, False),
        ),
        128: (
            _Tiles(64, 16, 2, 1, 2, False, max_seqlen_q=64),
            _Tiles(128, 16, 4, 1, 1, False, max_seqlen_q=128),
            _Tiles(256, 32, 8, 1, 1, False, serves=SOFTCAP),
            _Tiles(256, 16, 8, 1, 1, False),
        ),
        192: (_Tiles(64, 16, 2, 1, 1, False, 2, max_seqlen_q=64), _Tiles(128, 32, 4, 1, 1, False, 2)),
        256: (_Tiles(64, 8, 2, 1, 1, False, 2, max_seqlen_q=64), _Tiles(128, 16, 4, 1, 1, False, 2)),
        MAX_HEADDIM: (_Tiles(64, 8, 2, 1, 1, False, 4), _Tiles(32, 8, 1, 1, 1, False, 4)),
    },
    60: {
        64: (_Tiles(64, 32, 4, 1, 1, False),),
        128: (_Tiles(32, 16, 2, 1, 1, False),),
        256: (_Tiles(16, 8, 1, 1, 1, False),),
        MAX_HEADDIM: (_Tiles(16, 8, 1, 1, 1, False, 4),),
    },
}


_OLDEST_OF_INT8 = 75  # code path whose matrix instructions multiply bytes
# Softcaps between these are computed by fast arithmetic, whose error is about 2^-22 of the softcap.
_SOFTCAPS = 1e-6, 128.0
_HEADDIMS = (32, 64, 96, 128, 192, WIDEST_OF_A_WARP)  # columns of tiles


def representative_seqlens() -> list[int]:
    """Numbers of queries, one for every choice that depends on them; the last is a long sequence."""
    tiles = (sizes for by_headdim in _TILES.values() for candidates in by_headdim.values() for sizes in candidates)
    limits = {sizes.max_seqlen_q for sizes in tiles if sizes.max_seqlen_q is not None}
    return [*sorted(limits), max(limits) + 1]


def padded_headdims(headdim: int, headdim_v: int) -> tuple[int, int]:
    """Columns of tiles for head dimensions: of few sizes, so that variants stay few."""
    if max(headdim, headdim_v) > WIDEST_OF_A_WARP:
        return 512 if headdim <= 512 else MAX_HEADDIM, MAX_HEADDIM_V
    of_keys, of_values = (next(size for size in _HEADDIMS if columns <= size) for columns in (headdim, headdim_v))
    return of_keys, of_values


def candidates_for(problem: Problem, arch: int) -> list[KernelConfig]:
    """Kernels for a problem, best first. Those for fewer queries serve it too, if nothing else fits the GPU.

    With a block mask tiles whose rows keep the same blocks come first.
    """
    columns = padded_headdims(problem.headdim, problem.headdim_v)
    block_m = None if problem.block_size is None else problem.block_size[0]
    rules, drops, in_int8 = score_rules(problem), problem.dropout_p > 0.0, problem.qk_dtype is not None
    asked = demands(rules, drops, problem.cache_dtype is not None)

    def demerits(sizes: _Tiles) -> tuple[bool, int]:
        of_length = 0 if sizes.max_seqlen_q is None else max(0, problem.seqlen_q - sizes.max_seqlen_q)
        return mixes_blocks(block_m, sizes.tile_m), of_length

    return [
        KernelConfig(
            **fields_of(sizes, KernelConfig),
            arch=arch,
            dtype=computed_dtype(problem, arch),
            headdim=columns[0],
            headdim_v=columns[1] // sizes.num_value_parts,
            **rules,
            paged=problem.is_paged,
            drops=drops,
            block_sparse=block_m is not None,
            mixes_blocks=mixes_blocks(block_m, sizes.tile_m),
            int8_products=in_int8,
            cache_format=CACHE_FORMATS[problem.cache_dtype],
        )
        for sizes in sorted(tiles_for(_TILES[arch], columns), key=demerits)
        if asked <= sizes.serves and not (in_int8 and KEYS_OF_SCALE % sizes.tile_n)
    ]


def choose_config(problem: Problem, arch: int, limits: Limits) -> KernelConfig:
    """The configuration for a problem on a GPU. Raises CompileError when none fits."""
    return first_that_fits(candidates_for(problem, arch), limits)


AnyTiles = TypeVar("AnyTiles", bound=NamedTuple)


def tiles_for(by_headdim: Mapping[int, tuple[AnyTiles, ...]], columns: tuple[int, int]) -> tuple[AnyTiles, ...]:
    """The candidates of a code path for head dimensions, whose table has the widest that they serve."""
    return next(tiles for widest, tiles in by_headdim.items() if max(columns) <= widest)


def fields_of(tiles: NamedTuple, config: type[AttentionConfig]) -> dict[str, Any]:
    """What a row of a table sets of a configuration. Its other columns say for which calls it is meant."""
    names = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in tiles._asdict().items() if name in names}


def mixes_blocks(block_tokens: int | None, tile_m: int) -> bool:
    """Whether rows of a tile lie in several rows of blocks."""
    return block_tokens is not None and block_tokens % tile_m != 0


def multiplies_int8(arch: int, headdim: int = 0) -> bool:
    """Whether a code path multiplies bytes, of so wide a head: the products fit (kernels/online_softmax.cuh)."""
    return arch >= _OLDEST_OF_INT8 and headdim <= WIDEST_OF_A_WARP


def computed_dtype(problem: Problem, arch: int) -> torch.dtype:
    """The dtype in which kernels read and write tensors."""
    return torch.bfloat16 if problem.dtype is torch.bfloat16 and arch >= 80 else torch.float16


def score_rules(problem: Problem) -> dict[str, Any]:
    """What scores are besides products times a positive number, as fields of AttentionConfig."""
    given = problem.score_arguments
    extreme_softcap = "softcap" in given and not _SOFTCAPS[0] <= problem.softcap <= _SOFTCAPS[1]
    return {
        "softcaps": "softcap" in given,
        "has_alibi": "alibi_slopes" in given,
        "has_bias": "attn_bias" in given,
        "extreme_scores": extreme_softcap or not 1e-30 < problem.softmax_scale < 1e30,
    }


def demands(rules: Mapping[str, bool], drops: bool, quantized: bool = False) -> set[str]:
    """What a call has that takes registers: fields of a configuration. rules: `score_rules`."""
    return {field for field, on in {**rules, "drops": drops, "quantized": quantized}.items() if on}


def has_natural_scores(problem: Problem) -> bool:
    """Whether kernels keep scores in natural units, and not in those of powers of two (kernels/scores.cuh)."""
    rules = score_rules(problem)
    return bool(rules["has_bias"] or rules["extreme_scores"])


AnyConfig = TypeVar("AnyConfig", bound=AttentionConfig)


def first_that_fits(candidates: Iterable[AnyConfig], limits: Limits) -> AnyConfig:
    """The first candidate that a GPU can run. Raises CompileError with the reason against each when there is none."""
    reasons = []
    for config in candidates:
        reason = why_not_fitting(config, limits)
        if reason is None:
            return config
        reasons.append(f"{config.name}: {reason}")
    raise CompileError(f"no kernel fits compute capability {limits.target / 10:.1f}: {'; '.join(reasons)}")
