"""Fine blocks, with attention of several at once: which there are, whatever the model of plan.py predicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from fastattention.distributed.costs import Workload
from fastattention.distributed.plan import LEAST_BYTES, LEAST_ROWS, fine

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
