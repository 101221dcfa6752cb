"""Blocks in time, and which blocks are chosen."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention.distributed import divisions, plan
from fastattention.distributed.costs import ComputeCost, TransportCost, Workload
from fastattention.distributed.divisions import Blocks
from fastattention.distributed.plan import Costs, Plan, choose
from fastattention.distributed.timeline import simulate

MIB = 1 << 20
FULL = Workload(1, 8192, 8192, 16, 2, 128, 128, 8192, 2, 4, False)  # 128 MiB of all-reduce
CAUSAL = replace(FULL, causal=True)
BATCH = replace(CAUSAL, batch_size=8, seqlen_q=2048, seqlen_k=2048)
COMPUTE = ComputeCost(5e-4, 5e-4, 1e-6)

seconds = st.floats(0.0, 10.0)
slowdowns = st.floats(0.0, 5.0)
blocks = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8)


def transport(whole: float, *, latency: float = 1e-6, slowdown: float = 0.0, name: str = "c10d") -> TransportCost:
    """One that takes `whole` seconds for 128 MiB, and `latency` for next to nothing."""
    return TransportCost(name, ((1024, latency), (128 * MIB, whole)), slowdown)


def boundaries(rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(rows, initial=0))


def stepped(compute: list[float], communication: list[float], slowdown: float, own_slowdown: float) -> float:
    """The end of the last all-reduce, by going from one event to the next."""
    now, computed, reduced = 0.0, 0, 0
    work, transfers = list(compute), list(communication)
    while reduced < len(work):
        both = reduced < computed < len(work)
        stretch, own_stretch = (1 + slowdown, 1 + own_slowdown) if both else (1.0, 1.0)
        steps = [transfers[reduced] * own_stretch] if reduced < computed else []
        steps += [work[computed] * stretch] if computed < len(work) else []
        step = min(steps)
        now += step
        if reduced < computed:
            transfers[reduced] -= step / own_stretch
        if computed < len(work):
            work[computed] -= step / stretch
        finished = computed < len(work) and work[computed] <= 1e-12
        reduced += reduced < computed and transfers[reduced] <= 1e-12
        computed += finished
    return now


@given(blocks)
def test_without_slowdown_the_longest_way_through_the_blocks_decides(work: list[tuple[float, float]]) -> None:
    compute, communication = [one for one, _ in work], [other for _, other in work]
    longest = max(sum(compute[: k + 1]) + sum(communication[k:]) for k in range(len(work)))
    assert simulate(compute, communication, 0.0).seconds == pytest.approx(longest)


@given(st.integers(1, 16), seconds, seconds, seconds, seconds)
def test_equal_blocks_take_what_the_formula_says(n: int, c: float, a: float, a_c: float, a_a: float) -> None:
    expected = (c + a) / n + a_c + a_a + (n - 1) * max(c / n + a_c, a / n + a_a)
    assert simulate([c / n + a_c] * n, [a / n + a_a] * n, 0.0).seconds == pytest.approx(expected)


@given(blocks, slowdowns, slowdowns)
def test_both_lanes_are_slower_while_the_other_runs(
    work: list[tuple[float, float]], slowdown: float, own_slowdown: float
) -> None:
    compute, communication = [one for one, _ in work], [other for _, other in work]
    expected = stepped(compute, communication, slowdown, own_slowdown)
    assert simulate(compute, communication, slowdown, own_slowdown).seconds == pytest.approx(expected, abs=1e-9)


@given(blocks, slowdowns, slowdowns)
def test_both_lanes_keep_the_order_of_the_blocks(
    work: list[tuple[float, float]], slowdown: float, own_slowdown: float
) -> None:
    timeline = simulate([one for one, _ in work], [other for _, other in work], slowdown, own_slowdown)
    assert timeline.compute[0].start == 0.0
    for lane in (timeline.compute, timeline.communication):
        assert [event.block for event in lane] == list(range(len(work)))
    for before, after in pairwise(timeline.compute):
        assert after.start == before.end
    for before, after in pairwise(timeline.communication):
        assert after.start >= before.end
    for (alone, transfer), compute, communication in zip(work, timeline.compute, timeline.communication, strict=True):
        assert communication.start >= compute.end
        longest = (1 + own_slowdown) * transfer
        assert (1 - 1e-9) * transfer - 1e-9 <= communication.end - communication.start <= longest + 1e-9
        assert (1 - 1e-9) * alone - 1e-9 <= compute.end - compute.start <= (1 + slowdown) * alone + 1e-9


@given(blocks, slowdowns, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_faster_parts_never_make_it_slower(
    work: list[tuple[float, float]], slowdown: float, less_compute: float, less_communication: float
) -> None:
    compute, communication = [one for one, _ in work], [other for _, other in work]
    base = simulate(compute, communication, slowdown).seconds + 1e-9
    assert simulate([less_compute * one for one in compute], communication, slowdown).seconds <= base
    assert simulate(compute, [less_communication * one for one in communication], slowdown).seconds <= base
    assert simulate(compute, communication, less_compute * slowdown).seconds <= base


@given(blocks, st.floats(0.0, 1e6), st.floats(0.0, 1.0))
def test_slowdowns_of_which_the_product_is_at_most_one_cost_no_more_than_overlap_can_gain(
    work: list[tuple[float, float]], slowdown: float, share: float
) -> None:
    """In a second of both, 1 / (1 + slowdown) + 1 / (1 + own_slowdown) are done."""
    compute, communication = [one for one, _ in work], [other for _, other in work]
    serial = sum(compute) + sum(communication)
    found = simulate(compute, communication, slowdown, share / max(slowdown, 1.0)).seconds
    assert max(sum(compute), sum(communication)) - 1e-9 <= found <= serial + 1e-9


def test_all_rows_at_once_take_what_was_measured() -> None:
    costs = Costs(CAUSAL, COMPUTE, transport(1e-3))
    assert costs.compute_seconds(0, CAUSAL.rows) == pytest.approx(COMPUTE.seconds)
    assert costs.seconds((0, CAUSAL.rows)) == pytest.approx(COMPUTE.seconds + 1e-3)


def test_attention_of_a_block_takes_its_share_of_visible_pairs() -> None:
    attention_alone = ComputeCost(1.0, 0.0, 0.0)
    halves = ((0, 4096), (4096, 8192))
    causal, full = (Costs(workload, attention_alone, transport(1e-3)) for workload in (CAUSAL, FULL))
    assert [causal.compute_seconds(*half) for half in halves] == pytest.approx([0.25, 0.75], rel=1e-3)
    assert [full.compute_seconds(*half) for half in halves] == pytest.approx([0.5, 0.5])
    sequences = Costs(BATCH, attention_alone, transport(1e-3))
    assert sequences.compute_seconds(2048, 6144) == pytest.approx(0.25)
    assert sequences.compute_seconds(0, 1024) == pytest.approx(0.25 / 8, rel=1e-3)


def test_rows_that_see_no_key_share_what_attention_takes_evenly() -> None:
    nothing = Costs(replace(FULL, seqlen_k=0), ComputeCost(1.0, 0.0, 0.0), transport(1e-3))
    assert nothing.compute_seconds(0, 2048) == pytest.approx(0.25)


def test_each_further_block_adds_its_cost_and_a_cut_inside_a_causal_sequence_once_more() -> None:
    def added(workload: Workload, *inner: int) -> float:
        costs = Costs(workload, ComputeCost(1.0, 1.0, 0.125), transport(1e-3))
        return sum(costs.compute_seconds(*block) for block in pairwise((0, *inner, workload.rows))) - 2.0

    assert added(FULL) == pytest.approx(0.0)
    assert added(FULL, 2048, 4096) == pytest.approx(0.25)
    assert added(CAUSAL, 2048, 4096) == pytest.approx(0.5)
    assert added(BATCH, 2048, 4096) == pytest.approx(0.25)
    assert added(BATCH, 2048, 5120) == pytest.approx(0.375)


def test_the_seconds_of_a_division_are_those_of_its_timeline() -> None:
    slowed = replace(transport(1e-3, slowdown=0.7), own_slowdown=0.3)
    costs = Costs(CAUSAL, COMPUTE, slowed)
    division = (1024, 3072, 3072, 1024)
    assert costs.seconds(boundaries(division)) == pytest.approx(costs.timeline(Blocks(division)).seconds)
    gentle = Costs(CAUSAL, COMPUTE, replace(slowed, own_slowdown=0.0))
    assert costs.seconds(boundaries(division)) > gentle.seconds(boundaries(division))


def test_the_first_block_is_smallest_where_communication_dominates() -> None:
    found = choose(FULL, COMPUTE, [transport(3e-3)])
    assert len(found.rows) > 2
    assert list(found.rows) == sorted(found.rows)
    assert found.rows[0] < found.rows[-1] / 3


def test_the_last_block_is_smallest_where_compute_dominates() -> None:
    found = choose(FULL, COMPUTE, [transport(4e-4)])
    assert list(found.rows) == sorted(found.rows, reverse=True)
    assert found.rows[-1] < found.rows[0] / 3


def test_blocks_that_balance_both_lanes_are_no_faster_than_those_that_are_chosen() -> None:
    communication = transport(1.5e-3, latency=1e-5)
    a, a_a, a_c = 1.5e-3 - 1e-5, 1e-5, COMPUTE.block_seconds
    c = COMPUTE.seconds - a_c
    chosen = choose(FULL, COMPUTE, [communication]).seconds
    for n in range(2, 9):
        for first in (0.02, 0.05, 0.1, 0.2, 0.3):
            shares = [first]
            while len(shares) < n:
                shares.append(a / c * shares[-1] + (a_a - a_c) / c)
            rows = [share / sum(shares) * FULL.rows for share in shares]
            if min(rows) >= divisions.LEAST_ROWS:
                compute = [c * count / FULL.rows + a_c for count in rows]
                transfers = [a * count / FULL.rows + a_a for count in rows]
                assert chosen <= (1 + plan.SIMPLER + 1e-3) * simulate(compute, transfers, 0.0).seconds


def test_later_blocks_of_a_causal_sequence_are_smaller_for_they_see_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "NUMBERS_OF_BLOCKS", (2,))
    equal = transport(1e-3)
    causal, full = (choose(workload, ComputeCost(9e-4, 1e-4, 1e-6), [equal]) for workload in (CAUSAL, FULL))
    assert causal.rows[0] > full.rows[0]


@pytest.mark.parametrize(
    "workload",
    [
        replace(CAUSAL, batch_size=256, seqlen_q=1),
        replace(CAUSAL, batch_size=1, seqlen_q=1),
        replace(CAUSAL, seqlen_q=1000),
        replace(CAUSAL, seqlen_q=1023, seqlen_k=100000),
        replace(CAUSAL, batch_size=1023, seqlen_q=1),
        replace(CAUSAL, hidden=511),
    ],
    ids=["decode", "one token", "short prompt", "short chunk", "large decode", "few bytes"],
)
def test_small_calls_are_serial(workload: Workload) -> None:
    whole = workload.rows * workload.row_bytes
    balanced = TransportCost("c10d", ((1, 1e-9), (whole, 2.0)), 0.0)
    found = choose(workload, ComputeCost(1.0, 1.0, 0.0), [balanced])
    seconds = 2.0 + balanced.seconds(whole)
    assert found == Plan((workload.rows,), "c10d", seconds, seconds)


@pytest.mark.parametrize(("share", "blocks"), [(0.030, 1), (0.035, 2)])
def test_a_gain_under_three_percent_is_left(share: float, blocks: int) -> None:
    """All that there is to gain is the all-reduce's share of the time, less that of the last block."""
    fast = transport(share / (1 - share) * COMPUTE.seconds, latency=1e-9)
    found = choose(FULL, replace(COMPUTE, block_seconds=0.0), [fast])
    assert len(found.rows) == blocks
    assert found.seconds <= found.serial_seconds


@pytest.mark.parametrize(("batch_size", "seqlen"), [(8, 2048), (3, 5000), (4096, 4), (7, 777)])
def test_sequences_that_must_stay_whole_do(batch_size: int, seqlen: int) -> None:
    workload = replace(
        BATCH, batch_size=batch_size, seqlen_q=seqlen, seqlen_k=seqlen, causal=False, whole_sequences=True
    )
    found = choose(workload, COMPUTE, [transport(1e-3)])
    assert len(found.rows) > 1
    assert all(row % seqlen == 0 for row in boundaries(found.rows))
    assert choose(replace(workload, batch_size=1), COMPUTE, [transport(1e-3)]).rows == (seqlen,)


def test_cuts_between_sequences_are_preferred() -> None:
    costly = replace(COMPUTE, block_seconds=1e-5)
    found = choose(BATCH, costly, [transport(3e-4)])
    assert len(found.rows) > 1
    assert all(row % 2048 == 0 for row in boundaries(found.rows))


def test_a_sequence_is_cut_where_that_pays() -> None:
    two = replace(CAUSAL, batch_size=2)
    found = choose(two, COMPUTE, [transport(5e-4)])
    assert any(row % 8192 for row in boundaries(found.rows))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Workload, ComputeCost, TransportCost]:
    seqlen_q = draw(st.integers(1, 9000))
    workload = Workload(
        draw(st.integers(1, 12)),
        seqlen_q,
        draw(st.integers(0, 9000)),
        8,
        8,
        128,
        128,
        draw(st.sampled_from([512, 4096, 5120, 8192])),
        2,
        4,
        draw(st.booleans()),
        whole_sequences=draw(st.booleans()),
    )
    compute = ComputeCost(draw(st.floats(0, 5e-3)), draw(st.floats(0, 5e-3)), draw(st.floats(0, 1e-4)))
    latency = draw(st.floats(0, 1e-4))
    whole = latency + draw(st.floats(0, 2e-2))
    return workload, compute, transport(whole, latency=latency, slowdown=draw(st.floats(0.0, 4.0)))


@settings(deadline=None)
@given(problems())
def test_every_plan_covers_all_rows_in_blocks_that_are_large_enough(
    problem: tuple[Workload, ComputeCost, TransportCost],
) -> None:
    workload, compute, communication = problem
    found = choose(workload, compute, [communication])
    assert sum(found.rows) == workload.rows
    assert found.transport == communication.name
    assert found.seconds == pytest.approx(Costs(*problem).seconds(boundaries(found.rows)))
    if len(found.rows) > 1:
        assert min(found.rows) >= divisions.LEAST_ROWS
        assert min(found.rows) * workload.row_bytes >= divisions.LEAST_BYTES
        assert all(row % workload.seqlen_q % 128 == 0 for row in boundaries(found.rows))


@settings(deadline=None)
@given(problems())
def test_no_plan_is_predicted_to_be_slower_than_serial(problem: tuple[Workload, ComputeCost, TransportCost]) -> None:
    workload, compute, communication = problem
    found = choose(workload, compute, [communication])
    serial = compute.seconds + communication.seconds(workload.rows * workload.row_bytes)
    assert found.serial_seconds == serial
    assert found.seconds == serial if len(found.rows) == 1 else found.seconds <= (1 - plan.LEAST_GAIN) * serial
    slowed = replace(communication, slowdown=100.0)
    assert choose(workload, compute, [slowed]).rows == (workload.rows,)


@settings(deadline=None)
@given(problems(), st.floats(0.0, 1.0))
def test_more_bandwidth_makes_no_plan_slower(
    problem: tuple[Workload, ComputeCost, TransportCost], factor: float
) -> None:
    """But for gains that the choice leaves: of fewer blocks, of one block."""
    workload, compute, communication = problem
    faster = replace(communication, table=tuple((size, factor * taken) for size, taken in communication.table))
    left = (1 + 2 * plan.SIMPLER) / (1 - plan.LEAST_GAIN)
    slow, fast = (choose(workload, compute, [one]).seconds for one in (communication, faster))
    assert fast <= left * slow + 1e-12


@pytest.mark.parametrize("workload", [FULL, CAUSAL, replace(BATCH, batch_size=3)], ids=["full", "causal", "batch"])
@pytest.mark.parametrize("slowdown", [0.0, 1.0])
@pytest.mark.parametrize("whole", [4e-4, 1e-3, 1.5e-3, 4e-3])
def test_no_cuts_gain_much_over_those_that_are_found(
    workload: Workload, slowdown: float, whole: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "NUMBERS_OF_BLOCKS", (2, 3, 4))
    monkeypatch.setattr(plan, "PATIENCE", 9)
    costs = Costs(workload, replace(COMPUTE, block_seconds=1e-5), transport(whole, latency=2e-5, slowdown=slowdown))
    cuts = range(0, workload.rows, workload.rows // 32)[1:]
    inner = [division for blocks in (1, 2, 3) for division in combinations(cuts, blocks)]
    divisions = [(0, *one, workload.rows) for one in inner if all(past - row >= 512 for row, past in pairwise(one))]
    least = min(costs.seconds(division) for division in divisions)
    assert plan.divide(workload, costs)[0] <= (1 + plan.SIMPLER) * least


@pytest.mark.parametrize("whole", [4e-4, 1e-3, 3e-3])
def test_long_sequences_get_blocks_that_are_as_good(whole: float) -> None:
    communication = transport(whole)
    short = choose(CAUSAL, COMPUTE, [communication])
    longer = replace(CAUSAL, seqlen_q=CAUSAL.seqlen_q * 128, seqlen_k=CAUSAL.seqlen_k * 128)
    table = tuple((size * 128, taken) for size, taken in communication.table)
    long = choose(longer, COMPUTE, [replace(communication, table=table)])
    assert long.serial_seconds == pytest.approx(short.serial_seconds)
    assert long.seconds <= short.seconds


@pytest.mark.parametrize(("batch_size", "seqlen"), [(1, 1 << 20), (64, 8192), (4096, 512)])
@pytest.mark.parametrize(("whole", "most"), [(1e-6, 1000), (1e-4, 2000), (1e-3, 8000), (1e-2, 8000)])
def test_few_blocks_are_looked_at(
    batch_size: int, seqlen: int, whole: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that any shape is planned in milliseconds, and sooner where more blocks gain nothing."""
    looked_at = 0
    known = Costs.after

    def counted(self: Costs, *block: Any) -> Any:
        nonlocal looked_at
        looked_at += 1
        return known(self, *block)

    monkeypatch.setattr(Costs, "after", counted)
    workload = replace(CAUSAL, batch_size=batch_size, seqlen_q=seqlen, seqlen_k=seqlen)
    choose(workload, ComputeCost(0.1, 0.1, 1e-7), [transport(whole)])
    assert 1 <= looked_at <= most


def test_serial_takes_the_transport_that_is_fastest_alone() -> None:
    slow, fast = transport(2e-4, name="slow"), transport(1e-4, name="fast", slowdown=9.0)
    found = choose(replace(FULL, seqlen_q=700), COMPUTE, [slow, fast])
    assert (found.rows, found.transport) == ((700,), "fast")


def test_blocks_take_the_transport_that_is_fastest_with_them() -> None:
    """Though it is slower alone, and serial is predicted with the other."""
    fast, gentle = transport(1e-3, name="fast", slowdown=3.0), transport(1.1e-3, name="gentle")
    for offered in ([fast, gentle], [gentle, fast]):
        found = choose(FULL, COMPUTE, offered)
        assert len(found.rows) > 1
        assert found.transport == "gentle"
        assert found.serial_seconds == pytest.approx(COMPUTE.seconds + 1e-3)
        assert found.seconds == choose(FULL, COMPUTE, [gentle]).seconds
