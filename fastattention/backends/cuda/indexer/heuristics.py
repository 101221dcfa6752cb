"""Chooses the kernels of the indexer and how calls are divided, for a problem and a GPU. Needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.backends.cuda.indexer.config import HEADDIMS, KeyScoresConfig, TopKeysConfig
from fastattention.gpu_runtime.chips import Limits
from fastattention.indexer.problem import IndexerProblem

# So many scores are in memory at a time, 64 MB, unless the queries of one CTA have more keys.
_SCORES = 1 << 24
# Keys of a CTA: more of them take longer than the CTA's queries do to arrive.
_PART_KEYS = 4096
# Keys up to which several narrow CTAs choose for as many queries at a time. With more, a wide one reads more at a time.
_NARROW_KEYS = 1 << 14
_CTAS_OF_SM = 4  # so many, one after another, keep multiprocessors evenly busy


@dataclass(frozen=True)
class Division:
    """How a call is divided among launches and CTAs."""

    config: KeyScoresConfig
    top_keys: TopKeysConfig
    stride: int  # from the scores of a query to those of the next
    rows: int  # queries of a launch
    part_keys: int  # of a CTA


def operand_dtype(dtype: torch.dtype, arch: int) -> torch.dtype:
    """The dtype in which kernels read queries and keys: bfloat16 becomes float16 where products take no other."""
    return dtype if arch >= 80 else torch.float16


def choose(problem: IndexerProblem, arch: int, limits: Limits) -> Division:
    """The kernel of a call, and its division."""
    queries = _queries(problem, arch)
    padded = -(-problem.nheads // 16) * 16
    head_rows = next(rows for rows in (16, 32, 64) if padded <= rows and rows >= ARCH_FACTS[arch].step_rows)
    headdim = next(columns for columns in HEADDIMS if problem.headdim <= columns)
    # Queries come through the memory of keys, so with much of it they come at once.
    tile_n = 128 if limits.shared_per_cta >= 4 * 128 * headdim * 2 else 64
    config = KeyScoresConfig(
        arch,
        operand_dtype(problem.dtype, arch),
        headdim,
        head_rows,
        problem.nheads != head_rows,
        queries,
        tile_n,
        4 if arch >= 80 else 1,
        problem.paged,
    )
    stride = -(-max(problem.most_keys, 1) // 128) * 128
    rows = min(problem.total_q, max(_SCORES // stride // queries, 1) * queries)
    row_tiles = -(-rows // queries)
    parts = max(-(-_CTAS_OF_SM * limits.num_sms // max(row_tiles, 1)), -(-stride // _PART_KEYS))
    part_keys = -(-stride // parts // tile_n) * tile_n
    top_keys = TopKeysConfig(8 if problem.most_keys <= _NARROW_KEYS else 32)
    return Division(config, top_keys, stride, rows, max(part_keys, tile_n))


def _queries(problem: IndexerProblem, arch: int) -> int:
    """Queries of a CTA. A sequence with fewer queries leaves warps idle; Pascal has no room for more than one."""
    if arch < 70:
        return 1
    of_sequence = problem.total_q / max(problem.batch_size, 1)
    return 8 if of_sequence > 4 else 4 if of_sequence > 2 else 2 if of_sequence > 1 else 1
