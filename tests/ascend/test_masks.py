"""The mask of the kernel itself, read off its results: every small tile, every small length, every small window.

All scores are 0, so that every key that a query sees has the same weight, and the values are the unit vectors: a row of
the result says which keys its query saw. tests/unit/test_ascend_mask_tile.py tests the arithmetic, and this file its
use.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from tiers import sampled
from unit.samples import visible

from ascend.executor import CpuExecutedAscendBackend
from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import Options, prepare_dense, prepare_varlen
from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.tiling import Tiling

MOST = 6
LENGTHS = range(1, MOST + 1)
WINDOWS = range(-1, MOST + 1)


class SmallTilesBackend(CpuExecutedAscendBackend):
    """Tiles smaller than a Cube's, so that short sequences have many."""

    def __init__(self, tile_m: int, tile_n: int) -> None:
        super().__init__()
        self.sizes = {"outer_tile_m": tile_m, "outer_tile_n": tile_n}

    def _tiling(self, problem: Problem, chip: Chip) -> Tiling:
        return replace(super()._tiling(problem, chip), **self.sizes)


def seen(backend: CpuExecutedAscendBackend, problem: Problem, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, lse) of a call with one head."""
    assert backend.why_not(problem) is None
    out, lse, _ = backend.forward(problem, inputs)
    assert lse is not None
    return out, lse


def assert_sees(weights: torch.Tensor, lse: torch.Tensor, expected: torch.Tensor) -> None:
    """weights: (seqlen_q, seqlen_k or more); each key that is seen has its share, and lse counts them."""
    count = expected.sum(1, keepdim=True)
    torch.testing.assert_close(weights[:, : expected.shape[1]], expected / count.clamp(min=1), rtol=1e-6, atol=0.0)
    assert not weights[:, expected.shape[1] :].any()
    torch.testing.assert_close(lse, count[:, 0].float().log(), rtol=0.0, atol=1e-6)  # -inf where nothing is seen


@sampled
@pytest.mark.parametrize("tile_n", [1, 2, 4])
@pytest.mark.parametrize("tile_m", [1, 2, 4])
def test_every_query_sees_what_it_should(tile_m: int, tile_n: int) -> None:
    """One batch of all lengths of keys, varlen, for every length of queries and every window."""
    backend = SmallTilesBackend(tile_m, tile_n)
    total = sum(LENGTHS)
    k, v = torch.zeros(total, 1, 2), torch.cat([torch.eye(length, MOST) for length in LENGTHS]).unsqueeze(1)
    cu_seqlens_k = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    for seqlen_q, left, right in itertools.product(LENGTHS, WINDOWS, WINDOWS):
        q = torch.zeros(seqlen_q * len(LENGTHS), 1, 2)
        cu_seqlens_q = torch.arange(0, len(q) + 1, seqlen_q, dtype=torch.int32)
        options = Options(window_left=left, window_right=right, return_lse=True)
        # A longest length of 2 at least keeps queries, and not heads, in the rows of a tile.
        call = prepare_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max(seqlen_q, 2), MOST, options)
        out, lse = seen(backend, *call)
        for index, seqlen_k in enumerate(LENGTHS):
            rows = slice(index * seqlen_q, (index + 1) * seqlen_q)
            assert_sees(out[rows, 0], lse[0, rows], visible(seqlen_q, seqlen_k, left, right))


@pytest.mark.parametrize(("tile_m", "tile_n"), [(16, 32), (64, 16), (32, 128)])
def test_every_window_of_a_long_sequence(tile_m: int, tile_n: int) -> None:
    """Tiles and windows as they are shipped, in which an edge crosses several tiles or none."""
    backend = SmallTilesBackend(tile_m, tile_n)
    for seqlen_q, seqlen_k in ((200, 130), (97, 200)):
        q, k, v = torch.zeros(1, seqlen_q, 1, 16), torch.zeros(1, seqlen_k, 1, 16), torch.eye(seqlen_k)
        for left, right in itertools.product((-1, 0, 15, 16, 33, 128, 500), repeat=2):
            options = Options(window_left=left, window_right=right, return_lse=True)
            out, lse = seen(backend, *prepare_dense(q, k, v[None, :, None, :], options))
            assert_sees(out[0, :, 0], lse[0, 0], visible(seqlen_q, seqlen_k, left, right))
