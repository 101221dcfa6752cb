"""The row partitions that are tried for a call."""

from __future__ import annotations

from itertools import accumulate

import pytest

from fastattention.distributed.row_partitions import (
    CUT_ROWS,
    LEAST_BYTES,
    LEAST_ROWS,
    OVERLAPPED,
    RING,
    Partition,
    Recipe,
    partitions,
    worth_dividing,
)


def made(recipe: Recipe, batch_size: int, seqlen_q: int, whole_sequences: bool = False) -> Partition | None:
    """The partition of a call by one recipe."""
    return dict(partitions([recipe], batch_size, seqlen_q, whole_sequences=whole_sequences)).get(0)


@pytest.mark.parametrize(
    ("recipe", "call", "partition"),
    [
        (Recipe((1, 1)), (1, 8192), ((4096, 4096), ())),
        (Recipe((1, 3)), (1, 8192), ((2048, 6144), ())),
        (Recipe((3, 3, 2)), (8, 2048), ((6144, 6144, 4096), ())),
        (Recipe((1, 1)), (3, 1000), ((1000, 2000), ())),  # between sequences
        (Recipe((1,) * 4), (3, 1000), ((640, 768, 768, 824), ())),  # within few sequences, at multiples of 128
        (Recipe((1,) * 4, 1), (3, 1000), ((640, 768, 768, 824), (3000,))),
        (Recipe((1, 1), 1), (3, 1000), ((1408, 1592), (3000,))),  # products may be cut anywhere
        (Recipe((2, 1, 1), 2), (2, 2048), ((2048, 1024, 1024), (2048, 2048))),
        (Recipe((2, 1, 1), 2), (1, 4096), ((2048, 1024, 1024), (2048, 2048))),
    ],
    ids=str,
)
def test_shares_become_rows(recipe: Recipe, call: tuple[int, int], partition: tuple[tuple[int, ...], ...]) -> None:
    assert made(recipe, *call) == Partition(*partition)


@pytest.mark.parametrize("recipes", [OVERLAPPED, RING], ids=["overlapped", "ring"])
@pytest.mark.parametrize("whole_sequences", [False, True])
@pytest.mark.parametrize("call", [(1, 1024), (3, 1111), (5, 4321), (11, 700), (1, 100_001)], ids=str)
def test_blocks_are_large_enough_and_sum_to_all_rows(
    recipes: tuple[Recipe, ...], call: tuple[int, int], whole_sequences: bool
) -> None:
    batch_size, seqlen_q = call
    found = list(partitions(recipes, *call, whole_sequences=whole_sequences))
    assert found or whole_sequences
    for place, (rows, attention_rows) in found:
        shares, parts = recipes[place]
        assert len(rows) == len(shares)
        assert bool(attention_rows) == bool(parts)
        assert sum(rows) == sum(attention_rows or rows) == batch_size * seqlen_q
        assert min(rows) >= LEAST_ROWS
        attended = [*accumulate(attention_rows or rows)]
        if whole_sequences:
            assert all(end % seqlen_q == 0 for end in attended)
        elif batch_size == 1:
            assert all(end % CUT_ROWS == 0 for end in [*accumulate(rows), *attended] if end != seqlen_q)


def test_a_smaller_first_block_is_among_them() -> None:
    """The FastAttention paper has such blocks."""
    assert any(shares[0] < min(shares[1:]) for shares, _ in OVERLAPPED)


def test_blocks_of_fewer_rows_are_left_out() -> None:
    recipes = [Recipe((1,) * 8), Recipe((1, 1)), Recipe((1,) * 4)]
    for rows, places in ((2 * LEAST_ROWS - 1, []), (2 * LEAST_ROWS, [1]), (4 * LEAST_ROWS, [1, 2])):
        assert [place for place, _ in partitions(recipes, 1, rows, whole_sequences=False)] == places
    # A single sequence that must stay whole has no blocks of its own.
    assert made(Recipe((1, 1)), 1, 8192, whole_sequences=True) is None
    assert made(Recipe((1, 1), 1), 1, 8192, whole_sequences=True) == Partition((4096, 4096), (8192,))


def test_little_is_not_divided() -> None:
    assert worth_dividing(2 * LEAST_ROWS, LEAST_BYTES)
    assert not worth_dividing(2 * LEAST_ROWS - 1, LEAST_BYTES)
    assert not worth_dividing(2 * LEAST_ROWS, LEAST_BYTES - 1)
