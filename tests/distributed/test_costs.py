"""The work of a call, and the time of its compute and its all-reduce."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention.backends.common.tile_range import TileRange
from fastattention.distributed.costs import ComputeCost, RingCost, TransportCost, Workload
from fastattention.distributed.machines import MACHINES, find_machine
from fastattention.distributed.plan import choose
from fastattention.errors import ArgumentError

LLAMA_70B = Workload(8, 2048, 2048, 16, 2, 128, 128, 8192, 2, 4, True)  # the share of one of four ranks
TABLE = TransportCost("c10d", ((1000, 1.0), (2000, 3.0), (4000, 4.0)), 0.5)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    sizes = [draw(st.integers(1, 9)), draw(st.integers(1, 20)), draw(st.integers(0, 20))]
    window = draw(st.tuples(st.integers(-1, 22), st.integers(-1, 22)))
    return Workload(*sizes, 4, 2, 8, 16, 64, 2, 2, draw(st.booleans()), window)


@given(workloads(), st.data())
def test_visible_pairs_are_those_that_the_mask_lets_through(workload: Workload, data: st.DataObject) -> None:
    right = 0 if workload.causal else workload.window_size[1]
    mask = TileRange(workload.seqlen_q, workload.seqlen_k, workload.window_size[0], right)
    seen = [max(mask.row_end(row) - mask.row_begin(row), 0) for row in range(workload.seqlen_q)] * workload.batch_size
    first = data.draw(st.integers(0, workload.rows))
    past = data.draw(st.integers(first, workload.rows))
    assert workload.visible_pairs(first, past) == sum(seen[first:past])


def test_flop_are_those_of_the_products() -> None:
    full = replace(LLAMA_70B, causal=False, headdim_v=64)
    assert full.attention_flop() == 2 * 8 * 16 * 2048 * 2048 * (128 + 64)
    assert full.linear_flop() == 2 * 8 * 2048 * (16 * 64) * 8192
    assert LLAMA_70B.attention_flop() == 4 * 8 * 16 * (2048 * 2049 // 2) * 128
    assert (full.rows, full.row_bytes) == (16384, 16384)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [(1, 1.0), (999, 1.0), (1000, 1.0), (1500, 2.0), (2000, 3.0), (3000, 3.5), (4000, 4.0), (6000, 6.0)],
)
def test_an_all_reduce_is_interpolated_and_proportional_beyond_the_table(size: int, seconds: float) -> None:
    assert TABLE.seconds(size) == pytest.approx(seconds)


def test_a_table_of_one_entry_serves_all_sizes() -> None:
    cost = replace(TABLE, table=((1000, 1.0),))
    assert [cost.seconds(size) for size in (10, 1000, 3000)] == [1.0, 1.0, 3.0]


# Milliseconds of attention, product and all-reduce, measured on four H200.
@pytest.mark.parametrize(
    ("nheads", "hidden", "batch_size", "seqlen", "measured"),
    [
        (8, 4096, 1, 8192, 0.769),
        (16, 8192, 1, 8192, 1.585),
        (16, 8192, 8, 2048, 2.250),
        (8, 4096, 8, 2048, 1.018),
        (16, 8192, 1, 32768, 11.66),
    ],
)
def test_the_h200_preset_takes_about_what_four_were_measured_to_take(
    nheads: int, hidden: int, batch_size: int, seqlen: int, measured: float
) -> None:
    machine = find_machine("h200", 4)
    workload = Workload(batch_size, seqlen, seqlen, nheads, nheads, 128, 128, hidden, 2, 4, True)
    communication = machine.transports[0].seconds(workload.rows * workload.row_bytes)
    assert machine.compute(workload).seconds + communication == pytest.approx(measured / 1e3, rel=0.11)


# Loops over sequences with NCCL on four H200; milliseconds one after the other and overlapped.
@pytest.mark.parametrize(
    ("nheads", "hidden", "batch_size", "seqlen", "gain"),
    [
        (8, 4096, 8, 2048, 1.018 / 0.940),
        (8, 4096, 4, 4096, 1.16),
        (16, 8192, 8, 2048, 2.250 / 1.968),
        (16, 8192, 4, 4096, 1.22),
        (16, 8192, 16, 2048, 1.21),
    ],
)
def test_the_h200_preset_predicts_the_gains_that_were_measured(
    nheads: int, hidden: int, batch_size: int, seqlen: int, gain: float
) -> None:
    machine = find_machine("h200", 4)
    workload = Workload(batch_size, seqlen, seqlen, nheads, nheads, 128, 128, hidden, 2, 4, True)
    found = choose(workload, machine.compute(workload), machine.transports[:1])
    assert found.serial_seconds / found.seconds == pytest.approx(gain, rel=0.05)


@pytest.mark.parametrize("name", ["v100-pcie", "ascend-910b"])
def test_prompts_spend_on_all_reduce_what_is_published(name: str) -> None:
    machine = MACHINES[name]
    for batch_size, seqlen in ((8, 2048), (1, 8192), (1, 16384)):
        workload = Workload(batch_size, seqlen, seqlen, 64 // machine.tp, 1, 128, 128, 8192, 2, machine.tp, True)
        compute = machine.compute(workload).seconds
        communication = machine.transports[0].seconds(workload.rows * workload.row_bytes)
        assert 0.40 <= communication / (compute + communication) <= 0.87


def test_a_rank_of_two_moves_two_thirds_of_what_one_of_four_does() -> None:
    four, two = find_machine("h200", 4), find_machine("h200", 2)
    assert four == MACHINES["h200"]
    for more, fewer in zip(four.transports, two.transports, strict=True):
        if isinstance(more, RingCost):
            assert fewer == more  # which counts what it moves
        else:
            assert isinstance(fewer, TransportCost)
            assert fewer.seconds(1 << 26) == pytest.approx(2 / 3 * more.seconds(1 << 26))
    [by_pcie] = find_machine("v100-pcie", 2).transports
    assert isinstance(by_pcie, TransportCost)
    assert by_pcie.seconds(1 << 30) == pytest.approx((1 << 30) / 9e9, rel=0.001)


@pytest.mark.parametrize(
    ("name", "tp", "said"),
    [
        ("abacus", 4, "hardware='abacus' is not known; choose from h200, v100-pcie, ascend-910b"),
        ("h200", 1, "tp=1 of h200 leaves nothing to reduce; use 2 or more"),
    ],
)
def test_a_machine_that_is_not_known_is_refused(name: str, tp: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        find_machine(name, tp)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"attention_rate": 0.0}, "attention_rate=0.0 of h200 is not positive"),
        ({"linear_rate": float("nan")}, "linear_rate=nan of h200 is not positive"),
        ({"block_seconds": -1.0}, "block_seconds=-1.0 is negative"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(change: dict[str, float], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(MACHINES["h200"], **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 0}, "batch_size=0 is not positive"),
        ({"tp": 0}, "tp=0 is not positive"),
        ({"seqlen_k": -1}, "seqlen_k=-1 is negative"),
    ],
)
def test_a_call_that_cannot_be_is_refused(change: dict[str, int], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(LLAMA_70B, **change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"table": ()}, r"table of c10d has bytes \[\]; they must be positive and ascend"),
        ({"table": ((0, 1.0),)}, r"bytes \[0\]"),
        ({"table": ((2, 1.0), (2, 2.0))}, r"bytes \[2, 2\]"),
        ({"table": ((2, float("nan")),)}, "table of c10d has negative seconds"),
        ({"slowdown": -0.1}, "slowdown=-0.1 is negative"),
        ({"own_slowdown": float("nan")}, "own_slowdown=nan is negative"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(TABLE, **change)


def test_negative_compute_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"linear_seconds=-1\.0 is negative"):
        ComputeCost(1.0, -1.0, 0.0)
