"""Chooses the variants of the backward kernel. Pure Python, no device needed."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from fastattention.attention.problem import MAX_HEADDIM, Problem
from fastattention.backends.cuda.attention.config import WIDEST_OF_A_WARP, BackwardConfig
from fastattention.backends.cuda.attention.heuristics import (
    ALIBI,
    DROPOUT,
    EVERYTHING,
    NOTHING,
    SCORES,
    SOFTCAP,
    computed_dtype,
    demands,
    fields_of,
    first_that_fits,
    mixes_blocks,
    padded_headdims,
    score_rules,
    tiles_for,
)
from fastattention.errors import CompileError
from fastattention.gpu_runtime.chips import Limits


class _Tiles(NamedTuple):
    gradients: str
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    min_ctas: int
    num_value_parts: int = 1
    column_warps: int = 1
    serves: frozenset[str] = EVERYTHING  # calls with more than this do better with another tile


# Candidates of each kernel for head dimensions up to the key, best first: the first that suits the call and fits the
# GPU is taken. Where registers do not hold the gradients of keys and values of a warp's rows, each has a kernel of its
# own. "qkv" adds gradients of queries in any order and is tried first; calls that want the same bits in every run take
# the others. Candidates of 80 and 75 were timed on an H100 and an H200, those for other chips with as many CTAs as fit
# there (docs/decisions/0074-sum-gradients-of-queries-in-memory.md). Candidates of 70 were chosen by counting issue
# cycles (docs/decisions/0062-compute-gradients-by-two-kernels-on-gpus.md), the others by counting registers and shared
# memory.
_TILES: dict[int, dict[int, tuple[_Tiles, ...]]] = {
    80: {
        64: (
            _Tiles("kv", 128, 32, 4, 2, 2),
            _Tiles("kv", 64, 64, 4, 2, 2),
            _Tiles("kv", 64, 32, 4, 2, 2),
            _Tiles("q", 128, 64, 4, 2, 2, serves=ALIBI | DROPOUT),
            _Tiles("q", 64, 64, 4, 2, 3),
            _Tiles("q", 64, 64, 4, 2, 2),
            _Tiles("q", 64, 32, 4, 2, 2),
            _Tiles("qkv", 128, 32, 4, 2, 2, serves=SOFTCAP | ALIBI | DROPOUT),
            _Tiles("qkv", 64, 64, 4, 2, 2),
            _Tiles("qkv", 64, 64, 4, 1, 2),
            _Tiles("qkv", 64, 64, 4, 1, 1),
        ),
        128: (
            _Tiles("kv", 64, 64, 4, 2, 2, serves=ALIBI | SOFTCAP),
            _Tiles("kv", 64, 64, 4, 1, 2, serves=ALIBI),
            _Tiles("kv", 64, 32, 4, 2, 2),
            _Tiles("kv", 64, 32, 4, 1, 1),
            _Tiles("q", 128, 32, 4, 2, 2, serves=ALIBI | SOFTCAP),
            _Tiles("q", 64, 64, 4, 1, 2),
            _Tiles("q", 64, 32, 4, 1, 2),
            _Tiles("q", 64, 32, 4, 1, 1),
            _Tiles("qkv", 128, 64, 8, 2, 1, column_warps=2, serves=SCORES),
            _Tiles("qkv", 128, 64, 8, 2, 1, column_warps=4),
            _Tiles("qkv", 128, 64, 8, 2, 1, column_warps=2),
            _Tiles("qkv", 64, 64, 4, 1, 2, serves=SCORES),
            _Tiles("qkv", 128, 64, 8, 1, 1, column_warps=2),
            _Tiles("qkv", 64, 32, 4, 2, 1),
        ),
        WIDEST_OF_A_WARP: (
            _Tiles("k", 64, 32, 4, 1, 1),
            _Tiles("k", 32, 16, 2, 1, 1),
            _Tiles("v", 64, 64, 4, 1, 1),
            _Tiles("v", 64, 32, 4, 1, 1),
            _Tiles("v", 32, 16, 2, 1, 1),
            _Tiles("q", 128, 32, 8, 2, 1),
            _Tiles("q", 64, 32, 4, 1, 1),
            _Tiles("q", 32, 16, 2, 1, 1),
            _Tiles("qkv", 64, 64, 8, 2, 1, column_warps=4),
            _Tiles("qkv", 64, 64, 8, 1, 1, column_warps=4),
            _Tiles("qkv", 64, 64, 8, 1, 1, column_warps=2),
            _Tiles("qkv", 32, 32, 4, 1, 1, column_warps=2),
        ),
        MAX_HEADDIM: (
            _Tiles("k", 32, 32, 8, 1, 1, column_warps=4),
            _Tiles("k", 32, 16, 2, 1, 1, 2),
            _Tiles("v", 32, 32, 8, 1, 1, column_warps=4),
            _Tiles("v", 32, 16, 2, 1, 1, 2),
            _Tiles("q", 32, 32, 8, 1, 1, column_warps=4),
            _Tiles("q", 32, 16, 2, 1, 1, 2),
            _Tiles("qkv", 32, 32, 8, 1, 1, column_warps=4),
        ),
    },
    75: {
        64: (
            _Tiles("kv", 128, 32, 4, 1, 2, serves=NOTHING),
            _Tiles("kv", 128, 64, 8, 1, 1, serves=NOTHING),
            _Tiles("kv", 64, 32, 4, 1, 2),
            _Tiles("q", 128, 64, 4, 1, 2, serves=NOTHING),
            _Tiles("q", 128, 64, 8, 1, 1, serves=NOTHING),
            _Tiles("q", 64, 32, 4, 1, 2),
            _Tiles("qkv", 128, 32, 8, 1, 1),
            _Tiles("qkv", 64, 64, 4, 1, 1),
        ),
        128: (
            _Tiles("kv", 64, 32, 4, 1, 1, serves=NOTHING),
            _Tiles("kv", 64, 16, 4, 1, 1),
            _Tiles("q", 64, 32, 2, 1, 2, serves=NOTHING),
            _Tiles("q", 64, 48, 4, 1, 1, serves=NOTHING),
            _Tiles("q", 64, 32, 4, 1, 1),
            _Tiles("qkv", 64, 32, 8, 1, 1, column_warps=2),
        ),
        WIDEST_OF_A_WARP: (
            _Tiles("k", 32, 16, 2, 1, 1),
            _Tiles("v", 32, 16, 2, 1, 1),
            _Tiles("q", 32, 16, 2, 1, 1),
        ),
    },
    70: {
        64: (
            _Tiles("kv", 128, 32, 4, 1, 2, serves=NOTHING),
            _Tiles("kv", 128, 8, 4, 1, 2),
            _Tiles("q", 256, 64, 8, 1, 1, serves=NOTHING),
            _Tiles("q", 128, 16, 4, 1, 2),
        ),
        128: (
            _Tiles("k", 128, 32, 4, 1, 1, serves=NOTHING),
            _Tiles("k", 128, 8, 4, 1, 1),
            _Tiles("v", 256, 32, 8, 1, 1, serves=NOTHING),
            _Tiles("v", 128, 16, 4, 1, 1),
            _Tiles("q", 128, 32, 4, 1, 1, serves=NOTHING),
            _Tiles("q", 128, 8, 4, 1, 1),
        ),
        WIDEST_OF_A_WARP: (
            _Tiles("k", 64, 8, 2, 1, 1, 2),
            _Tiles("v", 64, 8, 2, 1, 1, 2),
            _Tiles("q", 64, 8, 2, 1, 1, 2),
        ),
    },
    60: {
        64: (_Tiles("kv", 64, 16, 4, 1, 1), _Tiles("q", 64, 16, 4, 1, 1)),
        128: (_Tiles("kv", 32, 8, 2, 1, 1), _Tiles("q", 32, 8, 2, 1, 1)),
        WIDEST_OF_A_WARP: (
            _Tiles("k", 32, 8, 2, 1, 1),
            _Tiles("v", 32, 8, 2, 1, 1),
            _Tiles("q", 32, 8, 2, 1, 1),
        ),
    },
}


def choose_backward(problem: Problem, arch: int, limits: Limits) -> list[BackwardConfig]:
    """The kernels that compute `problem.grads`. Raises CompileError when one does not fit the GPU.

    Gradients of queries are summed in any order where that is faster, unless the problem is deterministic.
    """
    columns = padded_headdims(problem.headdim, problem.headdim_v)
    if max(columns) > max(_TILES[arch]):
        raise CompileError(f"head dimension {max(problem.headdim, problem.headdim_v)} has no kernel for gradients here")
    rules, drops = score_rules(problem), problem.dropout_p > 0.0
    asked = demands(rules, drops)
    block_m, block_n = problem.block_size or (None, None)

    def mixes(tiles: _Tiles) -> bool:  # others come first
        return mixes_blocks(block_m if tiles.gradients == "q" else block_n, tiles.tile_m)

    configs = [
        BackwardConfig(
            **fields_of(tiles, BackwardConfig),
            arch=arch,
            dtype=computed_dtype(problem, arch),
            headdim=columns[0],
            headdim_v=columns[1],
            **rules,
            drops=drops,
            block_sparse=block_m is not None,
            mixes_blocks=mixes(tiles),
        )
        for tiles in sorted(tiles_for(_TILES[arch], columns), key=mixes)
        if asked <= tiles.serves
    ]
    wanted = set(problem.grads) & set("qkv")
    in_any_order = [config for config in configs if config.sums_queries]
    if in_any_order and wanted == set("qkv") and not problem.deterministic:
        with contextlib.suppress(CompileError):
            return [first_that_fits(in_any_order, limits)]
    in_order = [config for config in configs if not config.sums_queries]
    kinds = dict.fromkeys(config.gradients for config in in_order if wanted & set(config.gradients))
    return [first_that_fits([config for config in in_order if config.gradients == kind], limits) for kind in kinds]
