"""All ranks have one plan, or none begins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.case import DenseCase

from distributed.sums import Sum, check, check_repeated, run_part, run_repeated
from distributed.team import Team
from fastattention import ArgumentError
from fastattention.distributed import agreement, calibrate, divisions, trials
from fastattention.distributed.agreement import Agreed
from fastattention.distributed.blocks import AttentionLinear
from fastattention.distributed.costs import ComputeCost, TransportCost
from fastattention.distributed.plan import Plan, choose
from fastattention.distributed.transports import Transfer, Transport
from fastattention.distributed.transports.c10d import C10d
from fastattention.distributed.trials import Candidate
from fastattention.validation import Options, prepare_dense

CASE = DenseCase(name="agreed", batch_size=2, seqlen_q=12, seqlen_k=12, causal=True)
AUTO = Sum(CASE, "auto")


def forget() -> None:
    """As if the group were new, but for its communicators."""
    for known in agreement._agreements.values():
        known.agreed.clear()
        known.repeats.clear()
        known._costs.clear()
        known._compute_costs._known.clear()
        known._verdicts.clear()


def rank_dependent_plan(workload: object, compute: ComputeCost, transports: tuple[TransportCost, ...]) -> Plan:
    """What ranks with clocks of their own might choose: another plan each."""
    first = 5 + dist.get_rank()
    return Plan((first, 24 - first), transports[0].name, 0.0, 0.0)


@contextmanager
def planning(choose: Any = choose) -> Iterator[None]:
    """Calls so small are planned too, by `choose`."""
    with (
        mock.patch.object(divisions, "LEAST_BYTES", 1),
        mock.patch.object(divisions, "LEAST_ROWS", 1),
        mock.patch.object(agreement, "choose", choose),
        mock.patch.object(agreement, "even", lambda workload, number: (workload.rows,)),  # no other blocks
        mock.patch.object(trials, "LEAST_GAIN", -math.inf),  # blocks always win
    ):
        yield


def run_with_clocks_of_their_own(one: Sum) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    forget()
    with planning(choose=rank_dependent_plan):
        out = run_part(one)
    return out, [agreed.called.rows for known in agreement._agreements.values() for agreed in known.agreed.values()]


def test_the_plan_is_that_of_rank_0(team: Team) -> None:
    results = team.run(run_with_clocks_of_their_own, AUTO)
    assert [plans for _, plans in results] == [[(5, 19)]] * team.size
    check(AUTO, [out for out, _ in results])


def run_measured(one: Sum) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    forget()
    with planning():
        out = run_part(one)
    return out, [agreed.called.rows for known in agreement._agreements.values() for agreed in known.agreed.values()]


def test_a_measured_plan_gives_the_right_sum(team: Team) -> None:
    one = Sum(replace(CASE, batch_size=4, seqlen_q=700, seqlen_k=700, headdim=16), "auto")
    results = team.run(run_measured, one)
    assert len({str(plans) for _, plans in results}) == 1
    assert sum(results[0][1][0]) == one.rows
    check(one, [out for out, _ in results])


def run_without_planning(one: Sum) -> torch.Tensor:
    forget()
    with (
        mock.patch.object(calibrate, "transport_costs", side_effect=AssertionError("measured")),
        mock.patch.object(calibrate, "measure_compute", side_effect=AssertionError("measured")),
    ):
        return run_part(one)


def test_a_call_too_small_to_divide_is_not_measured(team: Team) -> None:
    check(AUTO, team.run(run_without_planning, AUTO))


def run_twice(one: Sum) -> torch.Tensor:
    """The second time nothing but sums may be communicated."""
    run_part(one)
    with (
        mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("communicated")),
        mock.patch.object(dist, "broadcast_object_list", side_effect=AssertionError("communicated")),
    ):
        return run_part(one)


@pytest.mark.parametrize("plan", ["auto", (5, 19)], ids=["auto", "given"])
def test_a_known_call_communicates_its_sums_alone(team: Team, plan: tuple[int, ...] | str) -> None:
    one = Sum(CASE, plan)
    check(one, team.run(run_twice, one))


def run_alike_twice(one: Sum, longer: Sum) -> int:
    """How often compute is measured for two calls."""
    forget()
    cost = ComputeCost(1.0, 1.0, 0.0)
    with planning(), mock.patch.object(calibrate, "measure_compute", return_value=cost) as measured:
        run_part(one)
        run_part(longer)
    return measured.call_count


def test_calls_that_are_alike_are_measured_once_and_by_rank_0(team: Team) -> None:
    longer = Sum(replace(CASE, seqlen_q=13, seqlen_k=13), "auto")
    assert team.run(run_alike_twice, AUTO, longer) == [1, 0, 0, 0]


def run_unlike(one: Sum, other: Sum, odd_rank: int) -> torch.Tensor:
    with mock.patch.object(C10d, "_begin", side_effect=AssertionError("a sum has begun")):
        return run_part(other if dist.get_rank() == odd_rank else one)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Sum(replace(CASE, seqlen_k=30), (4, 20)), ("rank 2 has seqlen_k=30", "rank 0 has seqlen_k=12")),
        (Sum(replace(CASE, softcap=3.0), (4, 20)), ("rank 2 has softcap=3.0", "rank 0 has softcap=0.0")),
        (Sum(CASE, (6, 18)), ("rank 2 has rows=(6, 18)", "rank 0 has rows=(4, 20)")),
        (Sum(CASE, "auto"), ("rank 2 has rows=None", "rank 0 has rows=(4, 20)")),
        (Sum(CASE, (4, 20), torch.bfloat16), ("rank 2 has dtype=torch.bfloat16", "rank 0 has dtype=torch.float32")),
        (Sum(CASE, (4, 20), bias=True), ("rank 2 has has_bias=True", "rank 0 has has_bias=False")),
    ],
    ids=["shape", "mask", "plan", "auto", "dtype", "bias"],
)
def test_ranks_that_differ_all_fail_before_any_sum_and_are_named(team: Team, other: Sum, says: tuple[str, ...]) -> None:
    for known in team.outcomes(forget):
        assert known is None
    one = Sum(CASE, (4, 20))
    for error in team.outcomes(run_unlike, one, other, 2):
        assert isinstance(error, ArgumentError)
        for text in says:
            assert text in str(error)
    check(one, team.run(run_part, one))


def run_with_broken_rank_0(one: Sum) -> torch.Tensor:
    forget()
    with planning(choose=mock.Mock(side_effect=MemoryError("no room to measure"))):
        return run_part(one)


def test_a_plan_that_rank_0_cannot_make_is_an_error_on_all_ranks(team: Team) -> None:
    first, *others = team.outcomes(run_with_broken_rank_0, AUTO)
    assert isinstance(first, MemoryError)
    for error in others:
        assert isinstance(error, RuntimeError)
        assert "rank 0" in str(error)
        assert "MemoryError: no room to measure" in str(error)
    check(AUTO, team.run(run_part, AUTO))


def run_more_kinds_than_are_kept(one: Sum) -> list[int]:
    """How many kinds are known after each call."""
    forget()
    known = agreement.agreement_of(dist.group.WORLD)
    counts = []
    with mock.patch.object(agreement, "MOST_KEPT", 2):
        for first in (3, 4, 5, 3):
            run_part(replace(one, plan=(first, one.rows - first)))
            counts.append(len(known.agreed))
    return counts


def test_what_is_kept_is_bounded(team: Team) -> None:
    assert team.run(run_more_kinds_than_are_kept, AUTO) == [[1, 2, 2, 2]] * team.size


@pytest.mark.parametrize("seqlen_q", [12, 1])
def test_a_call_like_an_earlier_one_is_summed_over_the_ranks(team: Team, seqlen_q: int) -> None:
    one = Sum(replace(CASE, seqlen_q=seqlen_q), "auto", bias=True)
    check_repeated(one, team.run(run_repeated, one))


def test_pairs_of_ranks_agree_and_sum_by_themselves(team: Team) -> None:
    one = Sum(CASE, (4, 20), bias=True)
    outs = team.run(run_part, one, "pairs")
    check(one, outs[:2])
    assert torch.equal(outs[2], outs[3])
    assert not torch.equal(outs[0], outs[2])


def capture_something_new() -> None:
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("communicated")),
    ):
        agreement._check_not_capturing(torch.device("cuda"))


def test_a_new_call_under_graph_capture_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cannot be captured in a CUDA graph.*once before"):
        capture_something_new()


def run_with_another_transport_in_graphs(one: Sum) -> list[Any]:
    """What has been reserved of it after two calls."""
    forget()
    known = agreement.agreement_of(dist.group.WORLD)
    in_graphs = mock.Mock(spec=C10d)
    called = Candidate((one.rows,), next(iter(known.transports.values())))
    with mock.patch.object(known, "_agree", return_value=Agreed(called, Candidate((4, 20), in_graphs))):
        run_part(one)
        run_part(one)
    return [tuple(reserved.args) for reserved in in_graphs.reserve.call_args_list]


def test_what_graphs_of_a_call_need_is_there_when_it_has_been_made(team: Team) -> None:
    team.run(run_part, AUTO)  # makes the transport
    row = 4 * AUTO.hidden
    assert team.run(run_with_another_transport_in_graphs, AUTO) == [[(24 * row, 20 * row)]] * team.size


def test_a_call_is_made_in_one_way_where_it_is_called_and_in_another_where_it_is_captured() -> None:
    known, key, group = agreement.Agreement(2), mock.Mock(), mock.Mock()
    key.problem.device = torch.device("cuda", 0)
    called, captured = Candidate((1,), mock.Mock(spec=C10d)), Candidate((1,), mock.Mock(spec=C10d))
    known.agreed[key] = Agreed(called, captured)
    for capturing, way in ((False, called), (True, captured)):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing):
            assert known.of(key, mock.Mock(), group) is way


def test_transports_that_serve_no_call_give_their_memory_back() -> None:
    known = agreement.Agreement(4)
    called, captured, loser = (mock.Mock(spec=C10d) for _ in range(3))
    known.transports = {(str(place), torch.device("cpu")): each for place, each in enumerate((called, captured, loser))}
    known.agreed[mock.sentinel.key] = Agreed(Candidate((1,), called), Candidate((1,), captured))
    known._release_unused()
    loser.release.assert_called_once()
    called.release.assert_not_called()
    captured.release.assert_not_called()


class Adding(Transport):
    """One that takes part in compute, so that its sums have no time of their own."""

    name, asks_for_shares = "adding", True

    def __init__(self) -> None:
        pass

    why_not = run = mock.Mock()  # type: ignore[assignment]


def test_only_sums_that_have_a_time_of_their_own_are_measured_and_compared_for_blocks_that_are_given() -> None:
    blockwise = mock.Mock(C10d, asks_for_shares=False)
    blockwise.name = "blockwise"
    transfer = Transfer(64, 8, torch.float32, torch.device("cpu"), 2)
    known, adding = agreement.Agreement(2), Adding()
    known.transports = {(each.name, transfer.device): each for each in (blockwise, adding)}
    cost = TransportCost("blockwise", ((1, 1.0),), 0.0)
    with mock.patch.object(calibrate, "transport_costs", return_value=(cost,)) as measured:
        assert known._quickest([adding, blockwise], transfer, (32, 32), mock.Mock()) is blockwise
        assert known._quickest([adding], transfer, (32, 32), mock.Mock()) is adding
    assert [call.args[0] for call in measured.call_args_list] == [[blockwise]]


def test_transports_that_ask_for_shares_have_divisions_of_their_own() -> None:
    problem, inputs = prepare_dense(*(torch.zeros(1, 4096, 2, 8) for _ in range(3)), Options(causal=True))
    call = AttentionLinear(problem, inputs, torch.zeros(8, 16), "cpu")
    transfer = Transfer(4096, 8, torch.float32, torch.device("cpu"), 2)
    with mock.patch.object(calibrate, "measure_compute", return_value=ComputeCost(1.0, 1.0, 0.0)):
        kind, ways = agreement.Agreement(2)._divided(call, transfer, [Adding()], [])
    assert list(ways.values()) == list(divisions.in_a_ring(calibrate.workload_of(call, 2)).values())
    assert {(way.transport, way.division) for way in ways} == {("adding", agreement.Division.RING)}
    assert kind == calibrate.kind_of(call, calibrate.workload_of(call, 2))
