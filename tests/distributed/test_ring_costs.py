"""Blocks in time where sums go round the ranks while each adds its own."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention.distributed.costs import ComputeCost, RingCost, TransportCost, Workload
from fastattention.distributed.divisions import LEAST_ROWS, Blocks, in_a_ring
from fastattention.distributed.plan import Plan, choose, offer_of
from fastattention.distributed.ring_costs import RingCosts
from fastattention.distributed.ring_order import steps
from fastattention.errors import ArgumentError

FULL = Workload(1, 8192, 8192, 16, 2, 128, 128, 8192, 2, 4, False)  # 128 MiB of all-reduce
CAUSAL = replace(FULL, causal=True)
COMPUTE = ComputeCost(4e-4, 6e-4, 2e-5)
RING = RingCost("ring_product", 3e11, 5e-6, 1e-5, 8e-6, 0.1)
FREE = replace(RING, bandwidth=math.inf, fetch_seconds=0.0, notice_seconds=0.0, product_seconds=0.0, slowdown=0.0)
WHOLE = Blocks((8192,))


def seconds(blocks: Blocks, ring: RingCost, compute: ComputeCost = COMPUTE, workload: Workload = FULL) -> float:
    return RingCosts(workload, compute, ring).timeline(blocks).seconds


@pytest.mark.parametrize("blocks", [WHOLE, Blocks((4096, 4096), (8192,)), Blocks((1000, 7192), (8192,))])
def test_sums_that_cost_nothing_leave_compute(blocks: Blocks) -> None:
    assert seconds(blocks, FREE) == pytest.approx(COMPUTE.seconds)


def test_every_part_of_attention_but_the_first_costs_a_block() -> None:
    halves = (4096, 4096)
    assert seconds(Blocks(halves), FREE) == pytest.approx(COMPUTE.seconds + 2e-5)
    quarters = (2048,) * 4
    assert seconds(Blocks(quarters, (2048, 2048, 4096)), FREE) == pytest.approx(COMPUTE.seconds + 2 * 2e-5)


def test_without_compute_every_rank_fetches_all_but_a_share_twice() -> None:
    ring = replace(FREE, bandwidth=1e9)
    moved = 2 * 3 / 4 * FULL.rows * FULL.row_bytes
    for blocks in (WHOLE, Blocks((4096, 4096)), Blocks((1000, 7192))):
        assert seconds(blocks, ring, ComputeCost(0.0, 0.0, 0.0)) == pytest.approx(moved / 1e9)
    assert RingCosts(FULL, COMPUTE, ring).all_reduce_seconds == pytest.approx(moved / 1e9)


def test_a_block_goes_round_with_nothing_beside_it() -> None:
    """Four products and three fetches in turns, then three fetches at once; four times the next rank has to notice."""
    share = FULL.rows * FULL.row_bytes / 4
    expected = COMPUTE.seconds + 4 * 8e-6 + 6 * (share / 3e11 + 5e-6) + 5 * 1e-5
    assert seconds(WHOLE, RING) == pytest.approx(expected)
    assert RingCosts(FULL, COMPUTE, RING).serial_seconds == pytest.approx(expected)


def test_two_blocks_of_two_ranks_by_hand() -> None:
    """Turns: attention and the first product of block 0; of block 1, then the second of 0; the second of 1."""
    two = replace(FULL, tp=2)
    compute = ComputeCost(1.0, 4.0, 0.0)
    ring = replace(FREE, bandwidth=two.rows * two.row_bytes / 4 / 3.0, slowdown=0.5)  # a share in three seconds
    timeline = RingCosts(two, compute, ring).timeline(Blocks((4096, 4096), (8192,)))
    # All products but the first run beside a fetch, 1.5 times as long. The last two wait for one before they begin.
    products = [(0.0, 2.0, 0), (2.0, 3.5, 1), (5.0, 6.5, 0), (8.0, 9.5, 1)]
    fetches = [(2.0, 5.0, 0), (5.0, 8.0, 1), (8.0, 11.0, 0), (11.0, 14.0, 1)]
    for lane, expected in ((timeline.compute, products), (timeline.communication, fetches)):
        assert np.array(lane) == pytest.approx(np.array(expected))


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=8),
    st.integers(2, 8),
    st.floats(1e8, 1e12),
    st.floats(0.0, 3.0),
    st.floats(0.0, 1e-3),
)
def test_nothing_begins_before_what_it_needs(
    rows: list[int], ranks: int, bandwidth: float, slowdown: float, notice: float
) -> None:
    workload = replace(CAUSAL, seqlen_q=sum(rows), tp=ranks)
    ring = replace(RING, bandwidth=bandwidth, slowdown=slowdown, notice_seconds=notice)
    timeline = RingCosts(workload, COMPUTE, ring).timeline(Blocks(tuple(rows)))
    order = list(steps(len(rows), ranks))
    products, fetches = (dict(zip(order, lane, strict=True)) for lane in (timeline.compute, timeline.communication))
    for lane in (timeline.compute, timeline.communication):
        assert [event.block for event in lane] == [block for block, _ in order]
        assert all(after.start >= before.end for before, after in pairwise(lane))
    for (block, step), product in products.items():
        assert fetches[block, step].start >= product.end + notice
        assert step == 0 or product.start >= fetches[block, step - 1].end
    worked = sum(event.end - event.start for event in timeline.compute)
    least = COMPUTE.seconds + (len(rows) - 1) * COMPUTE.block_seconds + len(order) * RING.product_seconds
    assert least * (1 - 1e-9) <= worked <= (1 + slowdown) * least * (1 + 1e-9)


@pytest.mark.parametrize("workload", [FULL, CAUSAL], ids=["full", "causal"])
def test_attention_of_blocks_is_that_of_the_pairs_that_they_see(workload: Workload) -> None:
    attention_alone = ComputeCost(1.0, 0.0, 0.0)
    rows = (1024, 3072, 4096)
    timeline = RingCosts(workload, attention_alone, FREE).timeline(Blocks(rows))
    firsts = [event for event in timeline.compute if event.end > event.start]
    pairs = [workload.visible_pairs(*ends) for ends in pairwise(accumulate(rows, initial=0))]
    assert [event.end - event.start for event in firsts] == pytest.approx([each / sum(pairs) for each in pairs])


def test_rows_that_see_no_key_share_what_attention_takes_evenly() -> None:
    timeline = RingCosts(replace(FULL, seqlen_k=0), ComputeCost(1.0, 0.0, 0.0), FREE).timeline(Blocks((2048, 6144)))
    assert [event.end for event in timeline.compute if event.end > event.start] == pytest.approx([0.25, 1.0])


def test_the_best_is_that_of_the_divisions_that_calls_try() -> None:
    costs = RingCosts(CAUSAL, COMPUTE, RING)
    found, blocks = costs.best()
    assert blocks in in_a_ring(CAUSAL).values()
    assert found == min(costs.timeline(each).seconds for each in in_a_ring(CAUSAL).values())
    assert costs.timeline(blocks).seconds == found


def test_too_few_rows_are_one_block() -> None:
    few = replace(CAUSAL, seqlen_q=2 * LEAST_ROWS - 1)
    assert RingCosts(few, COMPUTE, RING).best() == (math.inf, Blocks((few.rows,)))
    serial = RingCosts(few, COMPUTE, RING).serial_seconds
    assert choose(few, COMPUTE, [RING]) == Plan((few.rows,), "ring_product", serial, serial)


def test_it_is_chosen_where_it_is_fastest() -> None:
    slow = TransportCost("c10d", ((1024, 1e-6), (128 << 20, 6e-4)), 3.0)
    found = choose(FULL, COMPUTE, [slow, RING])
    serial, blocks = COMPUTE.seconds + slow.seconds(128 << 20), Blocks(found.rows, found.attended)
    assert (found.transport, found.serial_seconds) == ("ring_product", pytest.approx(serial))
    assert found.seconds == offer_of(FULL, COMPUTE, RING).timeline(blocks).seconds < 0.97 * serial
    assert choose(FULL, COMPUTE, [slow, replace(RING, bandwidth=1e9)]).transport == "c10d"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bandwidth": 0.0}, r"bandwidth=0\.0 of ring_product is not positive"),
        ({"notice_seconds": -1.0}, r"notice_seconds=-1\.0 is negative"),
        ({"slowdown": math.nan}, "slowdown=nan is negative"),
    ],
)
def test_a_ring_that_cannot_be_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(RING, **change)
