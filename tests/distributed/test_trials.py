"""Trials choose for all ranks alike, and blocks only where they pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.case import DenseCase
from tiers import thin

from distributed.sums import Sum, check, run_part
from distributed.team import Team
from fastattention.distributed import agreement, divisions, trials
from fastattention.distributed.plan import Plan
from fastattention.distributed.transports import Transfer
from fastattention.distributed.trials import (
    CALLS,
    FINALISTS,
    FIRST_ROUNDS,
    LONG_SECONDS,
    ROUNDS,
    Candidate,
    Trial,
    Winners,
)

CASE = DenseCase(name="tried", batch_size=2, seqlen_q=12, seqlen_k=12, causal=True)
BLOCKS = (7, 9, 8)
EVEN = (6, 6, 6, 6)
# Eight blocks, with attention of each, or of so many rows at once; four of six rows, with that of all.
FINE = (3,) * 8, (24, 0), (12, 12, 0), (12, 6, 6, 0), (24, 0, 6)
SERIAL = (24,)
WAYS = (SERIAL, BLOCKS, EVEN, *FINE)


def run_tried(one: Sum, seconds: dict[tuple[int, ...], float]) -> tuple[torch.Tensor, Any, int]:
    """With ranks whose clocks show these seconds, by `way_of` a candidate; the last rank's twice as many of blocks."""
    slow = dist.get_rank() == dist.get_world_size() - 1
    trials_made = []

    def taken(work: Any, *_: object, **__: object) -> float:
        work()
        trials_made.append(work)
        candidate = work.args[2]
        return seconds[way_of(candidate)] * (2 if slow and len(candidate.rows) > 1 else 1)

    for known in agreement._agreements.values():
        known.agreed.clear()
        known.repeats.clear()
        known._verdicts.clear()
    with (
        mock.patch.object(divisions, "LEAST_BYTES", 1),
        mock.patch.object(divisions, "LEAST_ROWS", 1),
        mock.patch.object(agreement, "choose", return_value=Plan(BLOCKS, "c10d", 0.0, 0.0)),
        mock.patch.object(trials, "called_seconds", taken),
        mock.patch.object(trials, "queued_seconds", taken),
    ):
        out = run_part(one)
        run_part(replace(one, case=replace(one.case, seqlen_k=13)))  # alike: not tried again
    [known] = [each for each in agreement._agreements.values() if each.agreed]
    [agreed, _] = known.agreed.values()
    return out, way_of(agreed.called), len(trials_made)


def way_of(candidate: Candidate) -> tuple[int, ...]:
    """One of WAYS."""
    assert sum(candidate.rows) == 24
    if not candidate.attended:
        return candidate.rows
    if candidate.rows == EVEN:
        return (*candidate.attended, 0, 6)
    assert candidate.rows == (3,) * 8
    return (*candidate.attended, 0)


@thin(quick=8, all=3)
@pytest.mark.parametrize(
    ("seconds", "rows"),
    [
        ((1.0, 0.4, 0.45, 0.5, 0.5, 0.5, 0.5, 0.5), BLOCKS),
        ((1.0, 0.45, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5), EVEN),
        ((1.0, 0.45, 0.45, 0.4, 0.5, 0.5, 0.5, 0.5), FINE[0]),
        ((1.0, 0.45, 0.45, 0.5, 0.4, 0.5, 0.5, 0.5), FINE[1]),
        ((1.0, 0.45, 0.45, 0.5, 0.5, 0.5, 0.4, 0.5), FINE[3]),
        ((1.0, 0.45, 0.45, 0.5, 0.5, 0.5, 0.5, 0.4), FINE[4]),
        ((1.0, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6), SERIAL),  # on the slowest rank they take 1.2
        ((1.0, 0.49, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5), SERIAL),  # a gain of 2% there
    ],
    ids="blocks even more-even whole-attention fine fewer-fine blocks-do-not-pay hardly".split(),
)
def test_the_slowest_rank_decides_for_all(team: Team, seconds: tuple[float, ...], rows: tuple[int, ...]) -> None:
    one = Sum(CASE, "auto")
    results = team.run(run_tried, one, dict(zip(WAYS, seconds, strict=True)))
    assert [chosen for _, chosen, _ in results] == [rows] * team.size
    finalists = 1 + FINALISTS
    assert [made for _, _, made in results] == [len(WAYS) + finalists * ROUNDS] * team.size
    check(one, [out for out, _, _ in results])


class Clocks:
    """Candidates by what they take as called and as captured, and how often each was timed."""

    def __init__(self, candidates: Sequence[tuple[int, float, float]]) -> None:
        """candidates: number of blocks, seconds called and captured."""
        self.called, self.captured = ([each[kind] for each in candidates] for kind in (1, 2))
        self.timed: list[tuple[str, int]] = []
        call = SimpleNamespace(compute=None, inputs=SimpleNamespace(q=torch.empty(0)))
        self._candidates = [
            Candidate((1,) * blocks, mock.Mock(place=place)) for place, (blocks, *_) in enumerate(candidates)
        ]
        self._trial = Trial(self._candidates, call, self.transfer("cuda"), mock.Mock())  # type: ignore[arg-type]

    @staticmethod
    def transfer(device_type: str) -> Transfer:
        return Transfer(8, 2, torch.float32, torch.device(device_type), 2)

    def clock(self, name: str, seconds: list[float]) -> Callable[..., float]:
        def taken(work: Any, *_: object, **__: object) -> float:
            place = work.args[2].transport.place
            self.timed.append((name, place))
            return seconds[place]

        return taken

    def winners(self) -> Winners:
        with (
            mock.patch.object(trials, "busy_seconds", self.clock("called", self.called)),
            mock.patch.object(trials, "queued_seconds", self.clock("queued", self.captured)),
            mock.patch.object(trials, "largest", lambda values, device, group: list(values)),
        ):
            return self._trial.winners()


@pytest.mark.parametrize(
    ("candidates", "winners"),
    [
        ([(1, 5.0, 5.0), (4, 6.0, 4.0)], (0, 1)),  # launches cost what blocks gain, but not in graphs
        ([(1, 5.0, 5.0), (1, 4.95, 5.1), (4, 9.0, 9.0)], (1, 0)),  # of one block, any gain counts
        ([(1, 5.0, 5.0), (1, 4.0, 4.0), (4, 3.95, 3.8)], (1, 2)),  # blocks gain over the best of those
        ([(1, 5.0, 5.0), (4, 4.9, 4.9)], (0, 1)),  # two per cent count in graphs alone
        ([(1, 5.0, 5.0), (4, 4.84, 4.96)], (1, 0)),
        ([(4, 3.0, 3.0), (1, 5.0, 5.0), (3, 2.0, 2.0)], (2, 2)),
        ([(1, 5.0, 5.0)], (0, 0)),
    ],
)
def test_calls_and_captures_have_winners_of_their_own(
    candidates: list[tuple[int, float, float]], winners: tuple[int, int]
) -> None:
    """In milliseconds."""
    short = [(blocks, 1e-3 * called, 1e-3 * captured) for blocks, called, captured in candidates]
    assert Clocks(short).winners() == winners


@pytest.mark.parametrize("seconds", [LONG_SECONDS / 2, LONG_SECONDS * 2], ids=["short", "long"])
def test_only_the_fastest_are_tried_at_length(seconds: float) -> None:
    """Of calls that are long, launches do not matter: the fastest as captured is the fastest as called."""
    fastest = seconds * CALLS
    whole = [(1, fastest * (5 + place), fastest * (5 - place)) for place in range(4)]
    divided = [(4, fastest * (6 + place), fastest * (5 - place)) for place in range(5)]
    clocks = Clocks([*whole, *divided])
    captured, called = [3, 2, 8, 7], [0, 1, 4, 5]
    assert len(called) == 2 * FINALISTS
    is_long = seconds > LONG_SECONDS
    assert clocks.winners() == (8 if is_long else 0, 8)
    everyone = range(9)
    once = [("queued", place) for place in everyone]
    if not is_long:
        once += [(kind, place) for kind in ("called", "queued") for _ in range(FIRST_ROUNDS) for place in everyone]
    as_called = [] if is_long else [("called", place) for _ in range(ROUNDS) for place in called]
    as_captured = [("queued", place) for _ in range(ROUNDS) for place in captured]
    assert clocks.timed == [*once, *as_called, *as_captured]
