"""Blocks that the model of plan.py does not choose, with attention of several at once: which there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from fastattention.distributed.costs import Workload
from fastattention.distributed.divisions import IN_A_RING, LEAST_BYTES, LEAST_ROWS, ROWS_OF_A_CUT, fine, in_a_ring

ONE = Workload(1, 8192, 8192, 16, 2, 128, 128, 8192, 2, 4, False)  # a sequence with 128 MiB of all-reduce


def test_attention_is_of_each_of_all_rows_of_halves_or_of_a_half_and_two_quarters_and_of_all_of_fewer() -> None:
    quarter = ONE.rows // 4
    rows = (ONE.rows // 8,) * 8
    assert fine(replace(ONE, causal=True)) == [
        (rows, ()),
        (rows, (4 * quarter,)),
        (rows, (2 * quarter,) * 2),
        (rows, (2 * quarter, quarter, quarter)),
        ((quarter,) * 4, (4 * quarter,)),
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 8, 11])
@pytest.mark.parametrize("whole_sequences", [False, True])
def test_blocks_are_large_enough_and_attention_has_whole_blocks(batch_size: int, whole_sequences: bool) -> None:
    for seqlen in (700, 1024, 4321):
        workload = replace(ONE, batch_size=batch_size, seqlen_q=seqlen, whole_sequences=whole_sequences)
        for rows, attended in fine(workload):
            assert sum(rows) == sum(attended or rows) == workload.rows
            assert 2 <= len(rows) <= 8
            assert {*accumulate(attended)} <= {*accumulate(rows)}
            # They are even but for cuts between sequences.
            assert min(rows) * workload.row_bytes >= LEAST_BYTES / 2
            if whole_sequences:
                assert all(end % seqlen == 0 for end in accumulate(rows))


def test_little_is_not_divided_finely() -> None:
    few_bytes = LEAST_BYTES * 4 // ONE.row_bytes
    for rows in (few_bytes - 1, LEAST_ROWS * 4 - 1):
        assert not fine(replace(ONE, seqlen_q=rows))


def test_blocks_in_a_ring_are_even_or_smaller_in_the_end_with_attention_of_all_rows_or_of_halves() -> None:
    eighth = ONE.rows // 8
    whole, halves = (8 * eighth,), (4 * eighth, 4 * eighth)
    assert list(in_a_ring(replace(ONE, causal=True)).values()) == [
        ((eighth,) * 8, whole),
        ((2 * eighth,) * 4, whole),
        ((2 * eighth,) * 3 + (eighth,) * 2, whole),
        ((4 * eighth,) * 2, whole),
        ((4 * eighth, 2 * eighth, 2 * eighth), whole),
        ((2 * eighth,) * 4, halves),
        ((4 * eighth, 2 * eighth, 2 * eighth), halves),
    ]


@pytest.mark.parametrize(("batch_size", "seqlen"), [(1, 2 * LEAST_ROWS), (3, 1111), (5, 4321), (1, 100_001)])
@pytest.mark.parametrize("whole_sequences", [False, True])
def test_blocks_in_a_ring_are_large_enough_and_attention_has_whole_sequences(
    batch_size: int, seqlen: int, whole_sequences: bool
) -> None:
    workload = replace(ONE, batch_size=batch_size, seqlen_q=seqlen, whole_sequences=whole_sequences)
    divisions = in_a_ring(workload)
    assert 1 <= len(divisions) <= len(IN_A_RING)
    for place, (rows, attended) in divisions.items():
        assert len(rows) == len(IN_A_RING[place][0])  # also where others are left out
        assert sum(rows) == sum(attended) == workload.rows
        assert min(rows) >= LEAST_ROWS
        assert all(end % ROWS_OF_A_CUT == 0 for end in [*accumulate(rows)][:-1])
        if whole_sequences:
            assert all(end % seqlen == 0 for end in accumulate(attended))


def test_too_few_rows_go_round_in_one_block() -> None:
    assert not in_a_ring(replace(ONE, seqlen_q=2 * LEAST_ROWS - 1))
