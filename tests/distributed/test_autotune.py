"""Trials choose for all ranks alike, and blocks only where they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed.team import Team
from fastattention.distributed import autotune
from fastattention.distributed.autotune import (
    BUSY,
    CALLS,
    FINALISTS,
    FIRST_ROUNDS,
    LONG_SECONDS,
    ROUNDS,
    SHORT_CALLS,
    Trial,
    eager_seconds,
)
from fastattention.distributed.row_blocks import CoarseAttention, Strategy
from fastattention.distributed.row_partitions import Partition
from fastattention.distributed.transports import Transfer

CPU = torch.device("cpu")


class Clocks:
    """Strategies with given times, eagerly and in a graph, and how often each was timed."""

    def __init__(self, strategies: Sequence[tuple[int, float, float]], device: str = "cuda") -> None:
        """strategies: number of blocks, seconds eagerly and in a graph."""
        self.eager, self.graph = ([each[kind] for each in strategies] for kind in (1, 2))
        self.timed: list[tuple[str, int]] = []
        self.runs = [0] * len(strategies)
        made = [Strategy(self.transport(place), Partition((1,) * each[0])) for place, each in enumerate(strategies)]
        call: Any = SimpleNamespace(compute=None, inputs=SimpleNamespace(q=torch.empty(0)))
        transfer = Transfer(8, 2, torch.float32, torch.device(device))
        self.trial = Trial(made, call, transfer, dist.group.WORLD)  # type: ignore[arg-type]

    def transport(self, place: int) -> Any:
        def run(compute: object, out: torch.Tensor, rows: tuple[int, ...]) -> None:
            assert out.shape == (8, 2)
            self.runs[place] += 1
            self.place = place

        return SimpleNamespace(run=run)

    def clock(self, name: str, seconds: list[float]) -> Callable[..., float]:
        def taken(work: Callable[[], object], device: torch.device) -> float:
            work()
            self.timed.append((name, self.place))
            return seconds[self.place]

        return taken

    def winners(self, largest: Any = lambda values, device, group: list(values)) -> tuple[int, int]:
        with (
            mock.patch.object(autotune, "eager_seconds", self.clock("eager", self.eager)),
            mock.patch.object(autotune, "graph_seconds", self.clock("graph", self.graph)),
            mock.patch.object(autotune, "largest", largest),
        ):
            return self.trial.winners()


@pytest.mark.parametrize(
    ("strategies", "winners"),
    [
        ([(1, 5.0, 5.0), (4, 6.0, 4.0)], (0, 1)),  # launches cost as much as blocks gain, but not in graphs
        ([(1, 5.0, 5.0), (1, 4.95, 5.1), (4, 9.0, 9.0)], (1, 0)),  # among strategies of one block, any gain counts
        ([(1, 5.0, 5.0), (1, 4.0, 4.0), (4, 3.95, 3.8)], (1, 2)),  # blocks must gain over the best of one block
        ([(1, 5.0, 5.0), (4, 4.9, 4.9)], (0, 1)),  # two per cent count only in graphs
        ([(1, 5.0, 5.0), (4, 4.84, 4.96)], (1, 0)),
        ([(4, 3.0, 3.0), (1, 5.0, 5.0), (3, 2.0, 2.0)], (2, 2)),
        ([(1, 5.0, 5.0)], (0, 0)),
        ([(4, 5.0, 4.0), (4, 4.9, 4.1)], (1, 0)),  # blocks that are given
    ],
)
def test_eager_calls_and_graphs_have_winners_of_their_own(
    strategies: list[tuple[int, float, float]], winners: tuple[int, int]
) -> None:
    """Times are in milliseconds."""
    short = [(blocks, 1e-3 * eager, 1e-3 * graph) for blocks, eager, graph in strategies]
    assert Clocks(short).winners() == winners


@pytest.mark.parametrize("seconds", [LONG_SECONDS / 2, LONG_SECONDS * 2], ids=["short", "long"])
def test_only_the_fastest_are_tried_at_length(seconds: float) -> None:
    """For long calls launches do not matter: the fastest in a graph is the fastest eagerly."""
    fastest = seconds * CALLS
    whole = [(1, fastest * (5 + place), fastest * (5 - place)) for place in range(4)]
    divided = [(4, fastest * (6 + place), fastest * (5 - place)) for place in range(5)]
    clocks = Clocks([*whole, *divided])
    in_graph, eagerly = [3, 2, 8, 7], [0, 1, 4, 5]
    assert len(eagerly) == 2 * FINALISTS
    is_long = seconds > LONG_SECONDS
    assert clocks.winners() == (8 if is_long else 0, 8)
    everyone = range(9)
    timed = [("graph", place) for place in everyone] * 2  # the first round warms up
    if not is_long:
        timed += [(kind, place) for kind in ("eager", "graph") for _ in range(FIRST_ROUNDS) for place in everyone]
        timed += [("eager", place) for _ in range(ROUNDS) for place in eagerly]
    assert clocks.timed == [*timed, *[("graph", place) for _ in range(ROUNDS) for place in in_graph]]


@pytest.mark.parametrize(("blocks", "calls"), [((1, 1), SHORT_CALLS), ((1, 2), CALLS)])
def test_calls_are_timed_several_in_a_row(blocks: tuple[int, int], calls: int) -> None:
    clocks = Clocks([(count, 1.0, 1.0) for count in blocks])
    clocks.winners()
    assert clocks.runs == [calls * sum(place == other for _, other in clocks.timed) for place in range(2)]


def test_off_a_gpu_there_are_no_graphs() -> None:
    clocks = Clocks([(1, 3.0, 1.0), (4, 2.0, 2.0), (4, 1.0, 3.0)], device="cpu")
    assert clocks.winners() == (2, 2)


def winners_on_slow_rank(first: float, *others: float) -> tuple[int, int]:
    """Winners among strategies of one, two and two blocks. Several blocks take twice as long on the last rank."""
    slow = 2.0 if dist.get_rank() == dist.get_world_size() - 1 else 1.0
    strategies = [(1, first, first), *((2, slow * each, slow * each) for each in others)]
    return Clocks(strategies, device="cpu").winners(largest=autotune.largest)


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [((1.0, 0.4, 0.45), 1), ((1.0, 0.45, 0.4), 2), ((1.0, 0.6, 0.6), 0), ((1.0, 0.49, 0.5), 0)],
    ids=["first", "second", "do-not-pay", "hardly"],
)
def test_the_slowest_rank_decides_for_all(team: Team, seconds: tuple[float, ...], winner: int) -> None:
    assert team.run(winners_on_slow_rank, *seconds) == [(winner, winner)] * team.size


def test_launches_on_a_busy_host_count_where_the_device_waits() -> None:
    clock = [10.0, 11.0, 11.2, 20.0, 21.0, 29.0]  # at the start, when all is launched, and at the end
    with mock.patch.object(autotune.time, "perf_counter", side_effect=clock):
        assert eager_seconds(lambda: None, CPU) == pytest.approx(BUSY)
        assert eager_seconds(lambda: None, CPU) == pytest.approx(9.0)


def test_attention_is_computed_at_once_where_a_partition_says_so() -> None:
    call: Any = mock.Mock()
    computes = []
    transport: Any = SimpleNamespace(run=lambda compute, out, rows: computes.append(compute))
    Strategy(transport, Partition((4, 4))).run(call, torch.empty(8, 2))
    Strategy(transport, Partition((4, 4), (8,))).run(call, torch.empty(8, 2))
    assert computes[0] is call.compute
    assert isinstance(computes[1].__self__, CoarseAttention)
