"""Measurements are the same on all ranks, kept, and turned into the numbers that plans are made from."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.calls import build_call
from conformance.case import DenseCase, KvCacheCase
from torch import Tensor

from distributed.team import Team
from fastattention.distributed import calibrate
from fastattention.distributed.blocks import AttentionLinear, Piece
from fastattention.distributed.costs import ComputeCost, TransportCost
from fastattention.distributed.exchange import from_rank_0, largest
from fastattention.distributed.transports import Transfer, Transport, make

CPU = torch.device("cpu")
TRANSFER = Transfer(1024, 2048, torch.float32, CPU, 4)
COSTS = (TransportCost("c10d", ((1, 2.0), (3, 4.5)), 0.25),)


def transports() -> list[Transport]:
    return [make("c10d", dist.group.WORLD, CPU)]


def measured(cache: str, transfer: Transfer = TRANSFER) -> tuple[TransportCost, ...]:
    with mock.patch.dict(os.environ, FASTATTENTION_CACHE=cache):
        return calibrate.transport_costs(transports(), transfer, dist.group.WORLD)


def read_back(cache: str, transfer: Transfer = TRANSFER) -> tuple[TransportCost, ...]:
    with mock.patch.object(calibrate, "_Measurement", side_effect=AssertionError("measured again")):
        return measured(cache, transfer)


def quick(cache: str, transfer: Transfer = TRANSFER) -> tuple[TransportCost, ...]:
    """Costs that are not measured."""
    with mock.patch.object(calibrate._Measurement, "cost", return_value=COSTS[0]):
        return measured(cache, transfer)


def test_tables_are_the_same_on_all_ranks_and_are_kept(team: Team, tmp_path: Path) -> None:
    first, *others = team.run(measured, str(tmp_path))
    assert others == [first] * 3
    [cost] = first
    sizes = [size for size, _ in cost.table]
    assert sizes[0] == 64 << 10
    assert sizes[-1] <= 16 << 20
    assert all(larger == 4 * size for size, larger in pairwise(sizes))
    assert all(seconds > 0 for _, seconds in cost.table)
    assert team.run(read_back, str(tmp_path)) == [first] * 4


def test_a_file_that_is_damaged_is_measured_again(team: Team, tmp_path: Path) -> None:
    team.run(quick, str(tmp_path))
    [file] = (tmp_path / "allreduce").iterdir()
    whole = file.read_text()
    for damaged in (
        "",
        whole[:-40],
        whole.replace("seconds", "s").replace("table", "t"),
        whole.replace("gloo", "nccl"),
        whole.replace("own_slowdown", "other"),
    ):
        file.write_text(damaged)
        assert team.run(quick, str(tmp_path)) == [COSTS] * 4
        assert json.loads(file.read_text()) == json.loads(whole)


def test_another_kind_of_group_has_a_file_of_its_own(team: Team, tmp_path: Path) -> None:
    team.run(quick, str(tmp_path))
    team.run(quick, str(tmp_path), TRANSFER._replace(dtype=torch.bfloat16))
    team.run(with_other_settings, str(tmp_path))
    assert len(list((tmp_path / "allreduce").iterdir())) == 3


def with_other_settings(cache: str) -> None:
    with mock.patch.dict(os.environ, NCCL_P2P_DISABLE="1"):
        quick(cache)


def warned(cache: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert quick(cache) == COSTS
    return [f"{each.category.__name__}: {each.message}" for each in caught]


def test_a_cache_that_cannot_be_written_is_a_warning_on_rank_0(team: Team, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    [warning], *others = team.run(warned, str(tmp_path / "file"))
    assert warning.startswith("RuntimeWarning: the times of all-reduces cannot be kept in")
    assert "FASTATTENTION_CACHE" in warning
    assert others == [[]] * 3


def measured_in_no_time(cache: str) -> int:
    with mock.patch.object(calibrate, "TABLE_SECONDS", 0.0):
        [cost] = measured(cache)
    return len(cost.table)


def test_a_table_ends_when_its_time_is_up_on_all_ranks(team: Team, tmp_path: Path) -> None:
    assert team.run(measured_in_no_time, str(tmp_path)) == [1] * 4


def agree_on_numbers() -> tuple[list[float], str]:
    rank = dist.get_rank()
    numbers = largest([float(rank), -float(rank), 7.0], CPU, dist.group.WORLD)
    return numbers, from_rank_0(lambda: f"of rank {rank}", dist.group.WORLD)


def test_messages_are_the_same_on_all_ranks(team: Team) -> None:
    assert team.run(agree_on_numbers) == [([3.0, 0.0, 7.0], "of rank 0")] * 4


def test_no_size_takes_longer_than_a_larger_one() -> None:
    measured = [(1, 5.0), (4, 1.0), (16, 2.0), (64, 9.0), (256, 8.0)]
    assert calibrate.ascending(measured) == ((1, 1.0), (4, 1.0), (16, 2.0), (64, 8.0), (256, 8.0))


class Lanes(Transport):
    """A device on which sums of 128 KiB take a second, and so do products, and both more side by side."""

    def __init__(self, slowdown: float, own_slowdown: float) -> None:
        self.slowdown, self.own_slowdown = slowdown, own_slowdown
        self.clock = Clock()
        self.left = 0.0  # of sums, in seconds that they take alone

    def why_not(self, transfer: Transfer) -> None:
        return None

    def run(self, *_: Any, **__: Any) -> None:
        raise AssertionError("no call is made")

    def begin(self, out: Tensor, rows: list[int]) -> Tensor:
        return out

    def all_reduce(self, partial: Tensor, out: Tensor) -> Lanes:
        self.left += partial.nbytes / 2**17
        return self

    def wait(self) -> None:
        self.clock.now += self.left
        self.left = 0.0

    def multiply(self) -> None:
        beside = min(1 + self.slowdown, self.left * (1 + self.own_slowdown))
        self.clock.now += 1.0 + beside * (1 - 1 / (1 + self.slowdown))
        self.left -= beside / (1 + self.own_slowdown)


@pytest.mark.parametrize("slowdown", [0.0, 0.25, 0.75])
@pytest.mark.parametrize("own_slowdown", [0.0, 0.25, 1.0, 30.0])
def test_slowdowns_of_both_lanes_are_told_apart(slowdown: float, own_slowdown: float) -> None:
    lanes = Lanes(slowdown, own_slowdown)
    measurement = calibrate._Measurement(lanes, Transfer(1024, 1024, torch.float32, CPU, 4), mock.Mock())
    with (
        mock.patch.object(time, "perf_counter", lanes.clock),
        mock.patch.object(calibrate, "largest", side_effect=lambda values, *_: values),
        mock.patch.object(calibrate._Measurement, "_product", return_value=lanes.multiply),
    ):
        found = measurement._slowdowns(1 << 20)
    assert found == pytest.approx((slowdown, own_slowdown), rel=1e-3, abs=1e-3)


def test_noise_makes_neither_lane_faster_nor_endlessly_slow() -> None:
    assert calibrate.slowdowns_of(alone=2.0, under=1.9, summed_alone=4.0, summed=3.5) == (0.0, 0.0)
    assert calibrate.slowdowns_of(alone=2.0, under=2.0, summed_alone=4.0, summed=6.5) == pytest.approx((0.0, 99.0))


def test_the_work_of_a_call() -> None:
    case = DenseCase(
        name="work", batch_size=3, seqlen_q=5, seqlen_k=7, nheads=4, nheads_k=2, headdim=8, headdim_v=16, window=(2, 1)
    )
    work = calibrate.workload_of(attention_linear(case), 4)
    assert (work.batch_size, work.seqlen_q, work.seqlen_k, work.nheads, work.nheads_k) == (3, 5, 7, 4, 2)
    assert (work.headdim, work.headdim_v, work.hidden, work.itemsize, work.tp) == (8, 16, 40, 4, 4)
    assert (work.causal, work.window_size, work.whole_sequences) == (False, (2, 1), False)


@pytest.mark.parametrize(("causal", "whole"), [(True, False), (False, True)])
def test_alibi_without_causal_keeps_sequences_whole(causal: bool, whole: bool) -> None:
    case = DenseCase(name="alibi", seqlen_q=5, seqlen_k=7, alibi="per_head", causal=causal)
    work = calibrate.workload_of(attention_linear(case), 4)
    assert (work.causal, work.whole_sequences) == (causal, whole)


def test_the_keys_of_a_cache_are_those_it_holds() -> None:
    case = KvCacheCase(name="held", seqlen_q=5, cache_seqlens=(10, 20, 31), spare=100)
    assert calibrate.workload_of(attention_linear(case), 4).seqlen_k == 20


def attention_linear(case: DenseCase | KvCacheCase) -> AttentionLinear:
    columns = case.nheads * case.headdim_of_v
    return AttentionLinear(*build_call(case, torch.float32).prepare(), torch.zeros(40, columns), "auto")


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(AttentionLinear):
    """Attention takes a second a row, and a block 3 seconds more."""

    clock: Clock

    def attend(self, piece: Piece) -> Tensor:
        self.clock.now += piece.num_rows
        return torch.zeros(piece.num_rows, self.weight.shape[0])

    def compute(self, start: int, stop: int, partial: Tensor) -> None:
        self.clock.now += stop - start + 3.0


@contextmanager
def timed(case: DenseCase) -> Iterator[Timed]:
    call = attention_linear(case)
    other = Timed(call.problem, call.inputs, call.weight.t(), "auto")
    other.clock = Clock()
    with mock.patch.object(time, "perf_counter", other.clock):
        yield other


@pytest.mark.parametrize(
    ("case", "block_seconds"),
    [
        (DenseCase(name="four-blocks", batch_size=1, seqlen_q=40, seqlen_k=40), 4 * 3.0 / 3),
        # A cut within a causal sequence counts twice, as in the model.
        (DenseCase(name="causal", batch_size=1, seqlen_q=40, seqlen_k=40, causal=True), 4 * 3.0 / 6),
        (DenseCase(name="causal-sequences", batch_size=8, seqlen_q=5, seqlen_k=5, causal=True), 4 * 3.0 / 3),
        (DenseCase(name="two-whole-sequences", batch_size=2, seqlen_q=5, seqlen_k=5, alibi="per_head"), 2 * 3.0 / 1),
        (DenseCase(name="a-whole-sequence", batch_size=1, seqlen_q=5, seqlen_k=5, alibi="per_head"), 0.0),
        (DenseCase(name="one-row", batch_size=1, seqlen_q=1, seqlen_k=40, causal=True), 0.0),
    ],
    ids=lambda value: value.name if isinstance(value, DenseCase) else "",
)
def test_what_one_more_block_costs(case: DenseCase, block_seconds: float) -> None:
    with timed(case) as call:
        cost = calibrate.measure_compute(call, calibrate.workload_of(call, 4))
    assert cost == ComputeCost(case.batch_size * case.seqlen_q, 0.0, block_seconds)


def test_a_call_that_takes_long_is_run_once_more_than_needed_at_most() -> None:
    runs: list[float] = []
    clock = Clock()

    def work() -> None:
        runs.append(1.0)
        clock.now += 1.0

    with mock.patch.object(time, "perf_counter", clock):
        assert calibrate._compute_seconds(work, CPU) == 1.0
    assert len(runs) == 2


def test_alike_calls_cost_in_proportion_to_their_work() -> None:
    known = calibrate.ComputeCosts()
    first = DenseCase(name="first", batch_size=4, seqlen_q=32, seqlen_k=40)
    cost = ComputeCost(8.0, 2.0, 0.5)
    with mock.patch.object(calibrate, "measure_compute", return_value=cost) as measure:
        found = [cost_of(known, case) for case in (first, replace(first, seqlen_q=24), replace(first, batch_size=5))]
        assert measure.call_count == 1
        cost_of(known, replace(first, seqlen_q=100))
        cost_of(known, replace(first, causal=True))
        assert measure.call_count == 3
    assert found == [cost, ComputeCost(6.0, 1.5, 0.5), ComputeCost(10.0, 2.5, 0.5)]


def cost_of(known: calibrate.ComputeCosts, case: DenseCase) -> Any:
    call = attention_linear(case)
    return known.of(call, calibrate.workload_of(call, 4))
