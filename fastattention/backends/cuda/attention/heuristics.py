"""Chooses the variant of the forward kernel. Pure Python, no device needed.

`choose_config` maps (Problem, code path, limits of the GPU) to a KernelConfig. decode_heuristics.py does so for few
queries over a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch

from fastattention.attention.problem import BLOCK_STEP, MAX_HEADDIM, MAX_HEADDIM_V, Problem
from fastattention.backends.cuda.attention.config import (
    WIDEST_OF_A_WARP,
    BackwardConfig,
    KernelConfig,
    why_not_fitting,
)
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import Limits
from fastattention.quantized import KEYS_OF_SCALE


class _Tiles(NamedTuple):
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    min_ctas: int
    queries_in_registers: bool
    num_value_parts: int = 1
    max_seqlen_q: int | None = None  # calls with more queries prefer another
    serves_scores: bool = True  # has registers to spare for modified scores
    column_warps: int = 1


# For head dimensions up to the key, the candidates, best first: the first that suits the call and fits the GPU is
# taken. The first ones of 80 and 75 were chosen on an H200 (docs/decisions/0018-choose-headdim-64-tiles-by-length.md),
# those of 70 by the predictions of benchmarks/volta_model
# (docs/decisions/0022-use-256-row-tiles-on-volta-at-headdim-128.md), the others by counting: as many warps, and
# as few reads of shared memory, as then fit.
_TILES: dict[int, dict[int, tuple[_Tiles, ...]]] = {
    80: {
        64: (
            _Tiles(128, 32, 4, 2, 3, False, max_seqlen_q=8191, serves_scores=False),
            _Tiles(192, 48, 4, 2, 2, False, serves_scores=False),
            _Tiles(128, 64, 4, 2, 2, False),
            _Tiles(128, 64, 4, 1, 2, False),
        ),
        128: (
            _Tiles(128, 64, 4, 1, 2, False, serves_scores=False),
            _Tiles(128, 64, 8, 1, 1, True, serves_scores=False),
            _Tiles(128, 32, 4, 1, 2, False),
            _Tiles(128, 32, 8, 1, 1, True),
        ),
        192: (_Tiles(128, 64, 8, 2, 1, True), _Tiles(64, 32, 4, 1, 1, True)),
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
            _Tiles(256, 32, 8, 1, 1, False, serves_scores=False),
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
_HEADDIMS = (32, 64, 96, 128, 192, WIDEST_OF_A_WARP)  # of tiles


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


def configs_for(
    arch: int,
    dtype: str,
    headdim: int,
    headdim_v: int,
    seqlen_q: int,
    modifies_scores: bool,
    paged: bool,
    drops: bool = False,
    block_size: tuple[int, int] | None = None,
    int8_products: bool = False,
) -> list[KernelConfig]:
    """The candidates for a call, best first: those for fewer queries serve it too, if nothing else fits the GPU.

    With a block mask tiles whose rows keep the same blocks come first.
    """
    columns = padded_headdims(headdim, headdim_v)
    tiles = next(tiles for limit, tiles in _TILES[arch].items() if max(columns) <= limit)

    def mixes_blocks(sizes: _Tiles) -> bool:
        return block_size is not None and block_size[0] % sizes.tile_m != 0

    def demerits(sizes: _Tiles) -> tuple[bool, int]:
        return mixes_blocks(sizes), 0 if sizes.max_seqlen_q is None else max(0, seqlen_q - sizes.max_seqlen_q)

    return [
        KernelConfig(
            arch=arch,
            dtype=dtype,
            headdim=columns[0],
            headdim_v=columns[1] // sizes.num_value_parts,
            tile_m=sizes.tile_m,
            tile_n=sizes.tile_n,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            min_ctas=sizes.min_ctas,
            queries_in_registers=sizes.queries_in_registers,
            num_value_parts=sizes.num_value_parts,
            column_warps=sizes.column_warps,
            modifies_scores=modifies_scores,
            paged=paged,
            drops=drops,
            block_sparse=block_size is not None,
            mixes_blocks=mixes_blocks(sizes),
            int8_products=int8_products,
        )
        for sizes in sorted(tiles, key=demerits)
        if (sizes.serves_scores or not (modifies_scores or drops))
        and (not int8_products or KEYS_OF_SCALE % sizes.tile_n == 0)
        and (block_size is None or serves_blocks(sizes.tile_m, sizes.tile_n, sizes.num_warps // sizes.column_warps))
    ]


def choose_config(problem: Problem, arch: int, limits: Limits) -> KernelConfig:
    """The configuration for a problem on a GPU. Raises CompileError when none fits."""
    candidates = configs_for(
        arch,
        computed_dtype(problem, arch),
        problem.headdim,
        problem.headdim_v,
        problem.seqlen_q,
        modifies_scores(problem),
        problem.is_paged,
        problem.dropout_p > 0.0,
        problem.block_size,
        problem.qk_dtype is not None,
    )
    return first_that_fits(candidates, limits)


def multiplies_int8(arch: int, headdim: int = 0) -> bool:
    """Whether a code path multiplies bytes, of so wide a head: the products fit (kernels/online_softmax.cuh)."""
    return arch >= _OLDEST_OF_INT8 and headdim <= WIDEST_OF_A_WARP


def serves_blocks(tile_m: int, tile_n: int, row_warps: int) -> bool:
    """Whether a block mask can be gone through by tiles: each is within a column of blocks, a warp's rows within a row.

    Sizes of blocks are multiples of BLOCK_STEP.
    """
    return BLOCK_STEP % tile_n == 0 and BLOCK_STEP % (tile_m // row_warps) == 0


def computed_dtype(problem: Problem, arch: int) -> str:
    """The dtype in which kernels read and write tensors."""
    return "bfloat16" if problem.dtype is torch.bfloat16 and arch >= 80 else "float16"


def modifies_scores(problem: Problem) -> bool:
    """Whether scores are more than products times a positive number."""
    modifiers = {"softcap", "alibi_slopes", "attn_bias"}
    return problem.softmax_scale <= 0.0 or not modifiers.isdisjoint(problem.score_arguments)


AnyConfig = TypeVar("AnyConfig", KernelConfig, BackwardConfig)


def first_that_fits(candidates: Iterable[AnyConfig], limits: Limits) -> AnyConfig:
    """The first candidate that a GPU can run. Raises CompileError with the reason against each when there is none."""
    reasons = []
    for config in candidates:
        reason = why_not_fitting(config, limits)
        if reason is None:
            return config
        reasons.append(f"{config.name}: {reason}")
    raise CompileError(f"no kernel fits compute capability {limits.target / 10:.1f}: {'; '.join(reasons)}")


def heads_per_l2_wave(problem: Problem, limits: Limits) -> int:
    """Query heads whose CTAs start together: their keys and values fit an eighth of L2, or are of one key head.

    CTAs of one such group of heads still run when those of the next two begin, queries and results pass through the
    cache too, and an H100 keeps a copy of what it reads in each half of it. Heads that share a key head stay together,
    and groups have as many each time, so that the last ones fill the GPU too.
    """
    return key_heads_per_l2_wave(problem, problem.seqlen_k, limits) * problem.group_size


def key_heads_per_l2_wave(problem: Problem, tokens: int, limits: Limits) -> int:
    """Key heads whose tiles stay in the L2 cache together. tokens: of keys and values, or of whatever a CTA streams."""
    key_head_bytes = tokens * (problem.headdim + problem.headdim_v) * 2
    most = max(1, limits.l2_bytes // 8 // max(key_head_bytes, 1))
    key_heads = max(1, problem.nheads_k * problem.batch_size)
    num_rounds = -(-key_heads // most)
    return -(-key_heads // num_rounds)
