"""When a rank dies or hangs, the others raise errors and do not hang: `Team` waits a minute for an answer."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiers import slow

from distributed.sums import Sum, check, run_part
from distributed.team import Team
from fastattention.distributed import agreement
from fastattention.distributed.row_blocks import AttentionOutProj
from fastattention.distributed.transports.c10d import C10d
from fastattention.testing.case import DenseCase

pytestmark = slow

ONE = Sum(DenseCase(name="broken", batch_size=2, seqlen_q=12, seqlen_k=12), (4, 6, 14))
TIMEOUT = 2.0


class WatchedCall(NamedTuple):
    """A rank's view of a failed call."""

    error: str | None
    begun: int
    waited: int


def run_watched(one: Sum, harm: Callable[[], None] | None = None, victim: int = 1) -> WatchedCall:
    """Makes a call in which `harm` is done to the victim when it computes its second block."""
    real_compute, all_reduce = AttentionOutProj.compute, C10d._all_reduce
    begun, waited = [], []

    def compute(self: AttentionOutProj, start: int, stop: int, partial: Any) -> None:
        if harm is not None and start == 4 and dist.get_rank() == victim:
            harm()
        real_compute(self, start, stop, partial)

    def begin(self: C10d, rows: torch.Tensor, asynchronous: bool) -> Any:
        work = all_reduce(self, rows, asynchronous)
        begun.append(work)

        def wait() -> None:
            waited.append(work)
            work.wait()

        return SimpleNamespace(wait=wait)

    text = None
    with mock.patch.object(AttentionOutProj, "compute", compute), mock.patch.object(C10d, "_all_reduce", begin):
        try:
            run_part(one)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return WatchedCall(text, len(begun), len(waited))


def die() -> None:
    os._exit(1)


def hang() -> None:
    time.sleep(3.0 * TIMEOUT)  # the victim then goes on: without a timeout the others would not notice


def fail() -> None:
    raise RuntimeError("out of memory on this rank")


@pytest.mark.parametrize("harm", [die, hang, fail])
def test_a_rank_that_stops_is_an_error_of_the_others(new_team: Callable[..., Team], harm: Callable[[], None]) -> None:
    team = new_team(2, TIMEOUT)
    check(ONE, team.run(run_part, ONE))
    report, victim = team.outcomes(run_watched, ONE, harm)
    assert report.error is not None
    assert report.begun == report.waited == 3
    if harm is fail:
        assert victim == ("RuntimeError: out of memory on this rank", 1, 1)
    [after] = team.outcomes(run_watched, ONE, ranks=[0])
    assert after.error is not None, "a group that has failed is used again"


def test_a_rank_that_does_not_come_to_a_new_call_is_an_error_of_the_others(new_team: Callable[..., Team]) -> None:
    [report] = new_team(2, TIMEOUT).outcomes(run_watched, ONE, ranks=[0])
    assert report.error is not None
    assert report.begun == 0


def timeout_of_our_communicator(one: Sum) -> timedelta:
    run_part(one)
    transport = agreement.agreement_of(dist.group.WORLD).transports["c10d", torch.device("cpu")]
    return transport._communicator.options._timeout


def test_the_timeout_is_that_of_the_group(new_team: Callable[..., Team]) -> None:
    assert new_team(2, 17.0).run(timeout_of_our_communicator, ONE) == [timedelta(seconds=17)] * 2


def begin_again(folder: str, one: Sum) -> list[tuple[int, int]]:
    """Makes, uses and destroys groups. Counts agreements and living groups after each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts, made = [], []
    for number in range(4):
        for group in (dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 0])):
            run_part(one, group=group)
            known = agreement.agreement_of(group)
            communicator = known.transports["c10d", torch.device("cpu")]._communicator
            made += [weakref.ref(group), weakref.ref(known), weakref.ref(communicator)]
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        del group, known, communicator
        dist.destroy_process_group()
        counts.append((len(agreement._agreements), sum(reference() is not None for reference in made)))
        dist.init_process_group("gloo", init_method=f"file://{folder}/again-{number}", rank=rank, world_size=size)
    return counts


def test_nothing_is_left_of_groups_that_have_been_destroyed(new_team: Callable[..., Team], tmp_path: Path) -> None:
    team = new_team(2, 30.0)
    for counts in team.run(begin_again, str(tmp_path), ONE):
        assert counts == [(0, 0)] * 4
    check(ONE, team.run(run_part, ONE))


def run_with_one_group_more(one: Sum) -> torch.Tensor:
    """Ranks 0 and 1 are a group, and rank 0 is also in another group without rank 1."""
    pair = dist.new_group([0, 1])
    dist.new_group([0, 2])
    return run_part(one, group=pair) if dist.get_rank() < 2 else torch.empty(0)


def test_ranks_may_be_in_different_numbers_of_groups(new_team: Callable[..., Team]) -> None:
    check(ONE, new_team(3, 30.0).run(run_with_one_group_more, ONE)[:2])


def begin_with_backend_of_others(folder: str, one: Sum) -> tuple[torch.Tensor, list[Any]]:
    """The backend is gloo under another name."""
    created = []

    def create(options: Any, _: object) -> Any:
        created.append((options.group_rank, options.group_size, list(options.global_ranks_in_group)))
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.Backend.register_backend("theirs", create, extended_api=True, devices=["cpu"])
    dist.init_process_group("theirs", init_method=f"file://{folder}/theirs", rank=rank, world_size=size)
    with mock.patch.object(dist.ProcessGroupGloo, "name", return_value="theirs"):
        return run_part(one), created


def test_backends_that_are_registered_serve_too(new_team: Callable[..., Team], tmp_path: Path) -> None:
    answers = new_team(2, 30.0).run(begin_with_backend_of_others, str(tmp_path), ONE)
    check(ONE, [out for out, _ in answers])
    assert [(len(made), made[-1]) for _, made in answers] == [(2, (0, 2, [0, 1])), (2, (1, 2, [0, 1]))]
