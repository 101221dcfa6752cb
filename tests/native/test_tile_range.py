"""The tile classification: Python and C++ agree, and both agree with the mask itself."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from unit.samples import visible

from fastattention.backends.common.tile_range import TileKind, TileRange
from fastattention.backends.cpu.library import load_library


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "left", "right"),
    [
        (6, 6, -1, 0), (4, 9, -1, 0), (9, 4, -1, 0), (7, 7, 2, 0), (5, 8, 1, 1), (8, 5, 0, -1), (6, 6, -1, -1),
        (6, 6, 0, 0),
    ],
)  # fmt: skip
def test_classification_is_what_the_mask_says(seqlen_q: int, seqlen_k: int, left: int, right: int) -> None:
    tiles = TileRange(seqlen_q, seqlen_k, left, right)
    mask = visible(seqlen_q, seqlen_k, left, right)
    rows, columns = range(seqlen_q), range(seqlen_k)
    for q0, k0 in itertools.product(rows, columns):
        for q1, k1 in itertools.product(range(q0, seqlen_q), range(k0, seqlen_k)):
            seen = mask[q0 : q1 + 1, k0 : k1 + 1]
            kind = tiles.classify(q0, q1, k0, k1)
            assert (kind is TileKind.FULL) == bool(seen.all()), (q0, q1, k0, k1)
            # Partial is allowed where nothing is seen (only a corner reaches the band); the reverse never is.
            assert kind is not TileKind.SKIPPED or not seen.any(), (q0, q1, k0, k1)


def test_rows_say_what_the_mask_says() -> None:
    for seqlen_q, seqlen_k, left, right in itertools.product((1, 3, 6), (1, 4, 6), (-1, 0, 2), (-1, 0, 3)):
        tiles = TileRange(seqlen_q, seqlen_k, left, right)
        for i, row in enumerate(visible(seqlen_q, seqlen_k, left, right).tolist()):
            begin, end = tiles.row_begin(i), tiles.row_end(i)
            assert [begin <= j < end for j in range(seqlen_k)] == row


@settings(max_examples=500, deadline=None)
@given(
    st.integers(1, 5000), st.integers(0, 5000), st.integers(-1, 600), st.integers(-1, 600), st.data(),
)  # fmt: skip
def test_python_and_native_agree(seqlen_q: int, seqlen_k: int, left: int, right: int, data: st.DataObject) -> None:
    first_q = data.draw(st.integers(0, seqlen_q - 1))
    last_q = data.draw(st.integers(first_q, seqlen_q - 1))
    first_k = data.draw(st.integers(0, max(seqlen_k - 1, 0)))
    last_k = data.draw(st.integers(first_k, first_k + 300))
    expected = TileRange(seqlen_q, seqlen_k, left, right).classify(first_q, last_q, first_k, last_k)
    found = load_library().classify_tile(seqlen_q, seqlen_k, left, right, first_q, last_q, first_k, last_k)
    assert found == expected
