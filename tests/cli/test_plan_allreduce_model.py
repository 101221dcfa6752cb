"""The model of `fastattention plan allreduce`: blocks in time, and which partition is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastattention.cli.plan import allreduce_model
from fastattention.cli.plan.allreduce_model import (
    Prompt,
    Timeline,
    attention_seconds,
    choose,
    one_after_the_other,
    predict,
    projection_seconds,
)
from fastattention.cli.plan.machines import MACHINES, AllReduce, Machine, Ring, find_machine
from fastattention.distributed.row_partitions import OVERLAPPED, Partition
from fastattention.errors import ArgumentError

TINY = Prompt(batch_size=2, seqlen=4, nheads=3, headdim=5, headdim_v=2, hidden=7, itemsize=2, tp=2)
LONG = Prompt(1, 8192, 16, 128, 128, 8192, 2, 4)  # 128 MiB of all-reduce
MIB = 1 << 20
# TINY takes a second for each visible pair, and for each row of its GEMM. A block costs a fifth.
UNIT = Machine("unit", 2 * 3 * 7, 2 * 3 * 2 * 7, 0.2, (), 2)
FREE_RING = Ring("ring_product", math.inf, 0.0, 0.0, 0.0, 0.0)

Lane = Sequence[tuple[float, ...]]
seconds = st.floats(0.0, 10.0)


def c10d(share: float, slowdown: float = 0.0, name: str = "c10d") -> AllReduce:
    """A transport whose all-reduce of LONG takes this share of its compute; times are proportional to bytes."""
    return AllReduce(name, ((1, share / (128 * MIB)), (128 * MIB, share)), OVERLAPPED, slowdown)


def machine(*transports: AllReduce | Ring) -> Machine:
    """A machine on which LONG takes a second, mostly attention, and blocks cost nothing."""
    return Machine(
        "made up", LONG.attention_flop(0, LONG.rows) / 0.6, LONG.projection_flop(LONG.rows) / 0.4, 0.0, transports, 4
    )


def approx_lanes(timeline: Timeline, compute: Lane, communication: Lane) -> None:
    assert np.array(timeline.compute) == pytest.approx(np.array(compute))
    assert np.array(timeline.communication) == pytest.approx(np.array(communication))


@pytest.mark.parametrize(("rows", "pairs"), [((0, 8), 20), ((0, 3), 6), ((3, 4), 4), ((2, 6), 10)])
def test_attention_counts_visible_pairs(rows: tuple[int, int], pairs: int) -> None:
    """The rows of two causal sequences see 1, 2, 3, 4 and 1, 2, 3, 4 keys."""
    assert TINY.attention_flop(*rows) == 2 * 3 * (5 + 2) * pairs


def test_rows_and_gemm_are_those_of_all_sequences() -> None:
    assert (TINY.rows, TINY.row_bytes, TINY.projection_flop(3)) == (8, 14, 2 * 3 * (3 * 2) * 7)


@pytest.mark.parametrize(
    ("size", "expected"), [(1, 1.0), (1000, 1.0), (1500, 2.0), (2000, 3.0), (3000, 3.5), (4000, 4.0), (6000, 6.0)]
)
def test_all_reduce_is_interpolated_and_proportional_beyond(size: int, expected: float) -> None:
    assert AllReduce("c10d", ((1000, 1.0), (2000, 3.0), (4000, 4.0))).seconds(size) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        (Partition((8,)), [20 + 0.1]),
        (Partition((4, 4)), [10 + 0.1, 10 + 0.1]),
        (Partition((3, 5)), [6 + 0.1, 14 + 0.3]),  # the second begins inside a sequence
        (Partition((2, 2, 4), (8,)), [20 + 0.1, 0, 0]),
        (Partition((1, 1, 4, 2), (4, 4)), [10 + 0.1, 0, 10 + 0.1, 0]),
        (Partition((6, 2), (4, 4)), [20 + 0.2, 0]),
    ],
    ids=str,
)
def test_attention_runs_with_the_block_that_needs_it_first(partition: Partition, expected: list[float]) -> None:
    assert attention_seconds(TINY, UNIT, partition) == pytest.approx(expected)


def test_a_gemm_costs_half_a_block() -> None:
    assert projection_seconds(TINY, UNIT, 3) == pytest.approx(3 + 0.1)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=8))
def test_without_slowdown_the_longest_path_decides(work: list[tuple[float, float]]) -> None:
    compute, communication = [one for one, _ in work], [other for _, other in work]
    longest = max(sum(compute[: k + 1]) + sum(communication[k:]) for k in range(len(work)))
    assert one_after_the_other(compute, communication, 0.0, 0.0).seconds == pytest.approx(longest, abs=1e-9)


def test_both_lanes_are_slower_beside_the_other() -> None:
    """Compute ends first; the all-reduce ends first; two all-reduces end beside the last of three blocks."""
    found = one_after_the_other([2, 2], [3, 1], slowdown=0.5, own_slowdown=0.2)
    approx_lanes(found, [(0, 2, 0), (2, 5, 1)], [(2, 5.5, 0), (5.5, 6.5, 1)])
    found = one_after_the_other([2, 2], [1, 1], slowdown=0.5, own_slowdown=0.2)
    approx_lanes(found, [(0, 2, 0), (2, 4.4, 1)], [(2, 3.2, 0), (4.4, 5.4, 1)])
    found = one_after_the_other([1, 1, 4], [3, 1, 1], slowdown=1.0, own_slowdown=0.5)
    approx_lanes(found, [(0, 1, 0), (1, 3, 1), (3, 9, 2)], [(1, 5.5, 0), (5.5, 7, 1), (9, 10, 2)])


def test_blocks_of_an_all_reduce_transport_by_hand() -> None:
    """20 pairs and 8 rows; rows 4 to 7 are computed in 14.2 s, under half of an all-reduce of 28.4 s."""
    transport = AllReduce("c10d", ((1, 28.4 / 56), (56, 28.4)), slowdown=0.0)
    found = predict(TINY, UNIT, transport, Partition((4, 4))).timeline
    approx_lanes(found, [(0, 14.2, 0), (14.2, 28.4, 1)], [(14.2, 42.6, 0), (42.6, 71, 1)])


def test_a_ring_that_costs_nothing_leaves_compute() -> None:
    for partition in (Partition((8,)), Partition((3, 5), (8,))):
        assert predict(TINY, UNIT, FREE_RING, partition).seconds == pytest.approx(20.1 + 8.1)


def test_one_block_goes_round_the_ring_with_nothing_beside_it() -> None:
    """Four ranks: GEMMs and three fetches in turns, then three fetches at once; five notices."""
    prompt = replace(TINY, tp=4)
    ring = Ring(
        "ring_product", bandwidth=14.0, fetch_seconds=0.3, notice_seconds=0.01, product_seconds=0.5, slowdown=9.0
    )
    expected = 20.1 + 8.1 + 4 * 0.5 + 6 * (2 + 0.3) + 5 * 0.01  # a share is 2 rows of 14 bytes
    assert predict(prompt, UNIT, ring, Partition((8,))).seconds == pytest.approx(expected)


def test_two_blocks_of_two_ranks_in_a_ring_by_hand() -> None:
    """Turns: attention and the first GEMM of block 0; of block 1, then the second of 0; the second of 1."""
    ring = replace(FREE_RING, bandwidth=2 * 14 / 3.0, slowdown=0.5)  # a share of 2 rows in three seconds
    free_blocks = replace(UNIT, block_seconds=0.0)
    found = predict(TINY, free_blocks, ring, Partition((4, 4), (8,))).timeline
    # All GEMMs but the first run beside a fetch, 1.5 times as long. The last begins when the sum that it adds to is
    # there.
    products = [(0, 22, 0), (22, 25, 1), (25, 28, 0), (28, 31, 1)]
    fetches = [(22, 25, 0), (25, 28, 1), (28, 31, 0), (31, 34, 1)]
    approx_lanes(found, products, fetches)
    slow = replace(ring, bandwidth=2 * 14 / 5.0)
    found = predict(TINY, free_blocks, slow, Partition((4, 4), (8,))).timeline
    products = [(0, 22, 0), (22, 25, 1), (27, 30, 0), (32, 35, 1)]
    fetches = [(22, 27, 0), (27, 32, 1), (32, 37, 0), (37, 42, 1)]
    approx_lanes(found, products, fetches)


def test_the_partitions_that_calls_try_are_predicted() -> None:
    with mock.patch.object(allreduce_model, "predict", wraps=predict) as predicted:
        choose(LONG, machine(c10d(1.0), replace(FREE_RING, recipes=()), AllReduce("peer_kernel", ((1, 1.0),))))
    asked = [(call.args[2].name, *call.args[3]) for call in predicted.call_args_list]
    halves, quarters, eighths = (4096,) * 2, (2048,) * 4, (1024,) * 8
    by_block = [halves, (2048, 6144), (6144, 2048), (3072, 3072, 2048), quarters, eighths]
    at_once = [quarters, eighths]
    assert asked == [
        *((name, (8192,), ()) for name in ("c10d", "ring_product", "peer_kernel")),
        *(("c10d", rows, ()) for rows in by_block),
        *(("c10d", rows, (8192,)) for rows in at_once),
    ]


def test_compute_longer_than_all_reduce_leaves_the_last_block() -> None:
    """With eight equal blocks without slowdown, one eighth of the all-reduce is exposed."""
    found = choose(LONG, machine(c10d(0.4)))
    assert len(found.best.partition.rows) == 8
    assert found.best.seconds == pytest.approx(1 + 0.4 / 8)
    assert (found.compute_seconds, found.all_reduce_seconds) == pytest.approx((1.0, 0.4))
    assert found.serial.seconds == pytest.approx(1.4)
    assert found.exposed_seconds == pytest.approx(0.05)
    assert found.hidden == pytest.approx(7 / 8)
    assert found.gain == pytest.approx(1.4 / 1.05)


@pytest.mark.parametrize(("share", "blocks"), [(0.0340, 1), (0.0345, 8)])
def test_several_blocks_must_gain_three_percent(share: float, blocks: int) -> None:
    """Eight blocks gain 7 / 8 of the all-reduce's share of the serial time."""
    found = choose(LONG, machine(c10d(share / (1 - share))))
    assert len(found.best.partition.rows) == blocks


@pytest.mark.parametrize(
    "change",
    [{"seqlen": 1}, {"seqlen": 1023}, {"seqlen": 1, "batch_size": 1023}, {"hidden": 511}],
    ids=["one token", "few rows", "decode", "few bytes"],
)
def test_small_calls_are_one_block(change: dict[str, int]) -> None:
    small = replace(LONG, **change)
    found = choose(small, machine(c10d(1.0)))
    assert found.best == found.serial
    assert found.best.partition == Partition((small.rows,))
    assert found.hidden == pytest.approx(0.0, abs=1e-9)


def test_blocks_and_serial_each_take_their_fastest_transport() -> None:
    fast, gentle = c10d(1.0, slowdown=3.0, name="fast"), c10d(1.1, name="gentle")
    for transports in ((fast, gentle), (gentle, fast)):
        found = choose(LONG, machine(*transports))
        assert (found.serial.transport, found.best.transport) == ("fast", "gentle")
        assert found.serial.seconds == pytest.approx(2.0)
        assert found.all_reduce_seconds == pytest.approx(1.1)
        assert found.best == choose(LONG, machine(gentle)).best


def test_the_gain_is_over_the_fastest_transport_in_one_block() -> None:
    """The slower one takes 33% off its own serial time, and 2% off that of the other."""
    found = choose(LONG, machine(c10d(0.61, name="slow"), AllReduce("fast", ((1, 0.0), (128 * MIB, 0.1)))))
    assert found.best == found.serial
    assert found.best.transport == "fast"


def test_a_rank_of_two_moves_two_thirds_of_what_one_of_four_does() -> None:
    four, two = find_machine("h200", 4), find_machine("h200", 2)
    assert (four, two.tp) == (MACHINES["h200"], 2)
    for more, fewer in zip(four.transports, two.transports, strict=True):
        if isinstance(more, AllReduce):
            assert isinstance(fewer, AllReduce)
            assert fewer.seconds(64 * MIB) == pytest.approx(2 / 3 * more.seconds(64 * MIB))
        else:
            assert fewer == more  # the model counts the bytes that move
    [by_pcie] = find_machine("v100-pcie", 2).transports
    assert isinstance(by_pcie, AllReduce)
    assert by_pcie.seconds(1024 * MIB) == pytest.approx(1024 * MIB / 9e9, rel=0.001)


# Milliseconds of attention, GEMM and NCCL's all-reduce, measured on four H200. Gains are of loops over sequences.
@pytest.mark.parametrize(
    ("nheads", "hidden", "batch_size", "seqlen", "serial", "gain"),
    [
        (8, 4096, 1, 8192, 0.769, None),
        (16, 8192, 1, 8192, 1.585, None),
        (16, 8192, 8, 2048, 2.250, 2.250 / 1.968),
        (8, 4096, 8, 2048, 1.018, 1.018 / 0.940),
        (16, 8192, 1, 32768, 11.66, None),
        (8, 4096, 4, 4096, None, 1.16),
        (16, 8192, 4, 4096, None, 1.22),
        (16, 8192, 16, 2048, None, 1.21),
    ],
)
def test_h200_with_nccl_takes_about_what_was_measured(
    nheads: int, hidden: int, batch_size: int, seqlen: int, serial: float | None, gain: float | None
) -> None:
    h200 = find_machine("h200", 4)
    prompt = Prompt(batch_size, seqlen, nheads, 128, 128, hidden, 2, 4)
    found = choose(prompt, replace(h200, transports=h200.transports[:1]))
    assert serial is None or found.serial.seconds == pytest.approx(serial / 1e3, rel=0.11)
    assert gain is None or found.gain == pytest.approx(gain, rel=0.06)


@pytest.mark.parametrize("sizes", [(8, 2048), (1, 8192), (1, 16384)], ids=str)
@pytest.mark.parametrize("name", ["v100-pcie", "ascend-910b"])
def test_prompts_spend_on_all_reduce_what_is_published(name: str, sizes: tuple[int, int]) -> None:
    preset = MACHINES[name]
    found = choose(Prompt(*sizes, 64 // preset.tp, 128, 128, 8192, 2, preset.tp), preset)
    assert 0.40 <= found.all_reduce_seconds / found.serial.seconds <= 0.87


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
