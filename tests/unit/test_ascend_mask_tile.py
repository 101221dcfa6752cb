"""The tiling-mask of the ascend backend is the full mask: windows of the mask tile, and tiles that need none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastattention.backends.ascend.mask_tile import MASK_TILE, mask_tile, window_column, window_row
from fastattention.backends.common.tile_range import TileKind, TileRange
from unit.samples import visible

MASK = mask_tile(torch.device("cpu")).numpy()


def window(delta: int, rows: int, columns: int) -> np.ndarray:
    """The window that a kernel reads for an edge at `delta`; it must lie inside the mask tile."""
    row, column = window_row(delta), window_column(delta)
    assert 0 <= row <= MASK_TILE - rows
    assert 0 <= column <= MASK_TILE - columns
    return MASK[row : row + rows, column : column + columns]


def tiled_mask(band: TileRange, first_q: int, first_k: int, rows: int, columns: int) -> np.ndarray:
    """The mask of a tile as windows of the mask tile give it."""
    delta = first_q + band.seqlen_k - band.seqlen_q - first_k
    hidden = np.zeros((rows, columns), dtype=bool)
    if band.right >= 0:
        hidden |= window(min(max(delta + band.right, -rows), columns), rows, columns)
    if band.left >= 0:
        hidden |= ~window(min(max(delta - band.left - 1, -rows), columns), rows, columns)
    return hidden


def check_tile(band: TileRange, full: np.ndarray, first_q: int, first_k: int, rows: int, columns: int) -> TileKind:
    """Checks that the tile's kind and windows agree with its part of the full mask."""
    expected = full[first_q : first_q + rows, first_k : first_k + columns]
    rows, columns = expected.shape
    kind = band.classify(first_q, first_q + rows - 1, first_k, first_k + columns - 1)
    assert (kind is TileKind.FULL) == (not expected.any())
    # A tile between two edges may be called partial though no row of it sees a key; never the other way round.
    assert kind is not TileKind.SKIPPED or expected.all()
    assert np.array_equal(tiled_mask(band, first_q, first_k, rows, columns), expected)
    return kind


def test_the_mask_tile_is_made_once_and_hides_above_its_diagonal() -> None:
    assert mask_tile(torch.device("cpu")) is mask_tile(torch.device("cpu"))
    assert MASK.shape == (MASK_TILE, MASK_TILE)
    assert MASK.dtype == np.bool_
    assert np.array_equal(MASK, np.arange(MASK_TILE)[None, :] > np.arange(MASK_TILE)[:, None])


def test_every_window_of_every_small_tile_is_the_mask_there() -> None:
    for rows, columns in itertools.product(range(1, 7), repeat=2):
        for delta in range(-rows, columns + 1):
            expected = np.arange(columns)[None, :] > np.arange(rows)[:, None] + delta
            assert np.array_equal(window(delta, rows, columns), expected)


@pytest.mark.parametrize("seqlen_q", range(1, 7))
def test_every_small_tile_of_every_small_band_is_right(seqlen_q: int) -> None:
    """All lengths, all windows, all tiles up to 4 x 4 with all their places, aligned or not."""
    kinds = set()
    for seqlen_k, left, right in itertools.product(range(1, 7), range(-1, 7), range(-1, 7)):
        band = TileRange(seqlen_q, seqlen_k, left, right)
        full = ~visible(seqlen_q, seqlen_k, left, right).numpy()
        for rows, columns in itertools.product((1, 2, 4), repeat=2):
            for first_q, first_k in itertools.product(range(0, seqlen_q, rows), range(seqlen_k)):
                kinds.add(check_tile(band, full, first_q, first_k, rows, columns))
    assert kinds == set(TileKind)


@given(
    seqlen_q=st.integers(1, 1200),
    seqlen_k=st.integers(1, 1200),
    left=st.integers(-1, 1500),
    right=st.integers(-1, 1500),
    log_rows=st.integers(0, 10),
    log_columns=st.integers(0, 10),
    data=st.data(),
)
def test_large_tiles_are_right(
    seqlen_q: int, seqlen_k: int, left: int, right: int, log_rows: int, log_columns: int, data: st.DataObject
) -> None:
    first_q = data.draw(st.integers(0, seqlen_q - 1), label="first_q")
    first_k = data.draw(st.integers(0, seqlen_k - 1), label="first_k")
    band = TileRange(seqlen_q, seqlen_k, left, right)
    full = ~visible(seqlen_q, seqlen_k, left, right).numpy()
    check_tile(band, full, first_q, first_k, 2**log_rows, 2**log_columns)
