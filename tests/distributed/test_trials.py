"""Trials choose for all ranks alike, and blocks only where they pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.case import DenseCase

from distributed.sums import Sum, check, run_part
from distributed.team import Team
from fastattention.distributed import agreement, calibrate, trials
from fastattention.distributed.plan import Plan

CASE = DenseCase(name="tried", batch_size=2, seqlen_q=12, seqlen_k=12, causal=True)
BLOCKS = (7, 9, 8)
SERIAL = (24,)


def run_tried(one: Sum, called: tuple[float, ...], captured: tuple[float, ...]) -> tuple[torch.Tensor, Any, int]:
    """With ranks whose clocks show these seconds of the candidates in turn, the last rank's twice as many of blocks."""
    slow = dist.get_rank() == dist.get_world_size() - 1
    trials_made = []

    def clock(seconds: tuple[float, ...]) -> Callable[..., float]:
        each = iter([seconds[0], *(2 * s if slow else s for s in seconds[1:])] * 9)

        def taken(work: Callable[[], object], *_: object, **__: object) -> float:
            work()
            trials_made.append(work)
            return next(each)

        return taken

    for known in agreement._agreements.values():
        known.agreed.clear()
        known._verdicts.clear()
    with (
        mock.patch.object(calibrate, "LEAST_BYTES", 1),
        mock.patch.object(calibrate, "LEAST_ROWS", 1),
        mock.patch.object(agreement, "choose", return_value=Plan(BLOCKS, "c10d", 0.0, 0.0)),
        mock.patch.object(trials, "called_seconds", clock(called)),
        mock.patch.object(trials, "queued_seconds", clock(captured)),
    ):
        out = run_part(one)
        run_part(replace(one, case=replace(one.case, seqlen_k=13)))  # alike: not tried again
    [known] = [each for each in agreement._agreements.values() if each.agreed]
    [agreed, _] = known.agreed.values()
    return out, (agreed.called.rows, agreed.captured.rows), len(trials_made)


@pytest.mark.parametrize(
    ("called", "captured", "rows"),
    [
        ((1.0, 0.4), (1.0, 0.4), (BLOCKS, BLOCKS)),
        ((1.0, 0.6), (1.0, 0.4), (SERIAL, BLOCKS)),  # on the slowest rank they take 1.2
        ((1.0, 0.49), (1.0, 0.9), (SERIAL, SERIAL)),  # a gain of 2% there
    ],
    ids=["blocks-pay", "blocks-pay-in-graphs", "blocks-do-not-pay"],
)
def test_the_slowest_rank_decides_for_all(
    team: Team, called: tuple[float, ...], captured: tuple[float, ...], rows: tuple[tuple[int, ...], ...]
) -> None:
    one = Sum(CASE, "auto")
    results = team.run(run_tried, one, called, captured)
    assert [chosen for _, chosen, _ in results] == [rows] * team.size
    assert [made for _, _, made in results] == [4] * team.size  # two candidates, called and queued
    check(one, [out for out, _, _ in results])
