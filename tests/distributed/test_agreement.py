"""All ranks make one call, and make it in one way, or none begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conformance.case import DenseCase, KvCacheCase

from distributed.sums import Sum, check, check_repeated, run_part, run_repeated
from distributed.team import Team
from fastattention import ArgumentError, UnsupportedError
from fastattention.distributed import agreement, row_partitions
from fastattention.distributed.agreement import Agreed, Agreement
from fastattention.distributed.autotune import Trial
from fastattention.distributed.row_blocks import Strategy
from fastattention.distributed.row_partitions import Partition, Recipe
from fastattention.distributed.transports import Transport
from fastattention.distributed.transports.c10d import C10d

CASE = DenseCase(name="agreed", batch_size=2, seqlen_q=12, seqlen_k=12, causal=True)
AUTO = Sum(CASE, "auto")


def forget() -> None:
    """As if the group were new, but for its communicators."""
    for known in agreement._agreements.values():
        known.agreed.clear()
        known.calls.clear()
        known._winners.clear()


@contextmanager
def small_blocks(recipes: tuple[Recipe, ...], eager: int = 1) -> Iterator[mock.Mock]:
    """Calls so small are divided too, in these ways; the trial, which is yielded, is won by the strategy `eager`."""
    with (
        mock.patch.object(row_partitions, "LEAST_BYTES", 1),
        mock.patch.object(row_partitions, "LEAST_ROWS", 1),
        mock.patch.object(row_partitions, "CUT_ROWS", 1),
        mock.patch.object(C10d, "recipes", recipes),
        mock.patch.object(Trial, "winners", autospec=True, return_value=(eager, eager)) as winners,
    ):
        yield winners


def strategies() -> list[tuple[tuple[int, ...], str]]:
    """What the groups of this rank have agreed on: blocks and transport of each call."""
    agreed = [each for known in agreement._agreements.values() for each in known.agreed.values()]
    return [(each.eager.partition.rows, each.eager.transport.name) for each in agreed]


def run_won_by(one: Sum, recipes: tuple[Recipe, ...], place: int) -> tuple[torch.Tensor, list[Any]]:
    forget()
    with small_blocks(recipes, place):
        return run_part(one), strategies()


@pytest.mark.parametrize(("place", "rows"), [(0, (24,)), (1, (6, 18)), (2, (12, 12))])
def test_a_call_is_made_as_the_trial_says(team: Team, place: int, rows: tuple[int, ...]) -> None:
    results = team.run(run_won_by, AUTO, (Recipe((1, 3)), Recipe((1, 1), 1)), place)
    assert [known for _, known in results] == [[(rows, "c10d")]] * team.size
    check(AUTO, [out for out, _ in results])


def run_really_tried(one: Sum) -> tuple[torch.Tensor, list[Any]]:
    forget()
    return run_part(one), strategies()


def test_a_call_that_is_really_tried_gives_the_right_sum(team: Team) -> None:
    case = replace(CASE, batch_size=4, seqlen_q=700, seqlen_k=700, headdim=16, nheads=2, nheads_k=2)
    one = Sum(case, "auto", hidden=800)
    results = team.run(run_really_tried, one)
    assert len({str(known) for _, known in results}) == 1
    assert sum(results[0][1][0][0]) == one.rows
    check(one, [out for out, _ in results])


def count_trials(sums: list[Sum]) -> int:
    """In which all calls are made."""
    forget()
    with small_blocks((Recipe((1, 3)),)) as winners:
        for one in sums:
            run_part(one)
    return winners.call_count


def alike(**changes: Any) -> Sum:
    return Sum(replace(CASE, **changes), "auto")


@pytest.mark.parametrize(
    ("sums", "trials"),
    [
        ([AUTO, alike(seqlen_q=13, seqlen_k=13)], 1),  # to a factor of two
        ([AUTO, alike(seqlen_q=40, seqlen_k=40)], 2),
        ([AUTO, alike(batch_size=8)], 2),
        ([AUTO, alike(causal=False)], 2),
        ([AUTO, Sum(CASE, "auto", hidden=20)], 2),
        ([Sum(CASE, (4, 20))] * 2, 0),  # there is one transport for given blocks
    ],
)
def test_of_calls_that_are_alike_one_is_tried(team: Team, sums: list[Sum], trials: int) -> None:
    assert team.run(count_trials, sums) == [trials] * team.size


def run_too_small_for_the_winner() -> list[Any]:
    forget()
    with small_blocks((Recipe((1,) * 11),)):
        for rows in (12, 10):
            run_part(alike(batch_size=1, seqlen_q=rows))
    return strategies()


def test_a_call_that_is_too_small_for_the_blocks_that_won_has_one(team: Team) -> None:
    eleven = (*(1,) * 10, 2), "c10d"
    assert team.run(run_too_small_for_the_winner) == [[eleven, ((10,), "c10d")]] * team.size


def kinds_of(seqlens: tuple[int, int]) -> Any:
    """What calls to a cache are alike to, by the lengths of rank 0; another rank has others."""
    kinds = []
    real = agreement._kind_of

    def noted(call: Any) -> Any:
        kinds.append(real(call))
        return kinds[-1]

    forget()
    lengths = seqlens if dist.get_rank() == 0 else (3, seqlens[1])
    one = Sum(KvCacheCase(name="cache", cache_seqlens=lengths, seqlen_q=3), "auto")
    with small_blocks(()), mock.patch.object(agreement, "_kind_of", noted):
        run_part(one)
    return [kind[0].seqlen_k for kind in kinds]


def test_the_lengths_of_a_cache_are_those_of_rank_0(team: Team) -> None:
    assert team.run(kinds_of, (30, 34)) == [[5], [], [], []]


def run_without_trial(one: Sum) -> torch.Tensor:
    forget()
    with mock.patch.object(Trial, "winners", side_effect=AssertionError("tried")):
        return run_part(one)


def test_a_call_too_small_to_divide_is_not_tried_where_one_transport_serves_it(team: Team) -> None:
    check(AUTO, team.run(run_without_trial, AUTO))


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


def run_unlike(one: Sum, other: Sum, odd_rank: int) -> torch.Tensor:
    with mock.patch.object(C10d, "_all_reduce", side_effect=AssertionError("a sum has begun")):
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
        (Sum(CASE, (4, 20), hidden=20), ("rank 2 has hidden=20", "rank 0 has hidden=40")),
    ],
    ids=["shape", "mask", "plan", "auto", "dtype", "bias", "hidden"],
)
def test_ranks_that_differ_all_fail_before_any_sum_and_are_named(team: Team, other: Sum, says: tuple[str, ...]) -> None:
    team.run(forget)
    one = Sum(CASE, (4, 20))
    for error in team.outcomes(run_unlike, one, other, 2):
        assert isinstance(error, ArgumentError)
        for text in says:
            assert text in str(error)
    check(one, team.run(run_part, one))


def run_with_broken_rank_0(one: Sum) -> torch.Tensor:
    forget()
    with small_blocks(()), mock.patch.object(agreement, "_kind_of", side_effect=MemoryError("no room to look")):
        return run_part(one)


def test_an_error_of_rank_0_is_one_on_all_ranks(team: Team) -> None:
    first, *others = team.outcomes(run_with_broken_rank_0, AUTO)
    assert isinstance(first, MemoryError)
    for error in others:
        assert isinstance(error, RuntimeError)
        assert "rank 0" in str(error)
        assert "MemoryError: no room to look" in str(error)
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


# --- transports and graphs ---


class Fake(Transport):
    """One that could serve anything, or has a reason."""

    def __init__(self, name: str = "fake", reason: str | None = None) -> None:
        self.name, self.reason = name, reason  # type: ignore[misc]
        self.reserve, self.release = mock.Mock(), mock.Mock()  # type: ignore[method-assign]

    def why_not(self, transfer: Any) -> str | None:
        return self.reason

    def run(self, compute: Any, out: torch.Tensor, rows: tuple[int, ...]) -> None:
        raise AssertionError("run")


def strategy(name: str = "fake") -> Strategy:
    return Strategy(Fake(name), Partition((24,)))


def run_with_another_transport_in_graphs(one: Sum) -> list[Any]:
    """What has been reserved of it after two calls."""
    forget()
    known = agreement.agreement_of(dist.group.WORLD)
    eager, graph = Strategy(next(iter(known.transports.values())), Partition((one.rows,))), strategy()
    with mock.patch.object(known, "_agree", return_value=Agreed(eager, graph)):
        run_part(one)
        run_part(one)
    return [tuple(reserved.args) for reserved in graph.transport.reserve.call_args_list]  # type: ignore[attr-defined]


def test_what_graphs_of_a_call_need_is_there_when_it_has_been_made(team: Team) -> None:
    team.run(run_part, AUTO)  # makes the transport
    nbytes = 24 * 4 * AUTO.hidden
    assert team.run(run_with_another_transport_in_graphs, AUTO) == [[(nbytes,)]] * team.size


def test_a_call_is_made_in_one_way_eagerly_and_in_another_in_a_graph() -> None:
    known, key, group = Agreement(2), mock.Mock(), mock.Mock()
    key.problem.device = torch.device("cuda", 0)
    agreed = known.agreed[key] = Agreed(strategy(), strategy())
    for capturing, expected in ((False, agreed.eager), (True, agreed.graph)):
        with mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=capturing):
            assert known.of(key, mock.Mock(), group) is expected


def test_a_new_call_under_graph_capture_is_refused() -> None:
    key, group = mock.Mock(), mock.Mock()
    key.problem.device = torch.device("cuda", 0)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("communicated")),
        pytest.raises(ArgumentError, match=r"cannot be captured in a CUDA graph.*once before"),
    ):
        Agreement(2).of(key, mock.Mock(), group)


def test_transports_that_serve_no_call_give_their_memory_back() -> None:
    known, agreed, loser = Agreement(4), Agreed(strategy("eager"), strategy("graph")), Fake("loser")
    used = [each.transport for each in agreed]
    known.transports = {(each.name, torch.device("cpu")): each for each in (*used, loser)}
    known.agreed[mock.sentinel.key] = agreed
    known._release_unused()
    assert [each.release.call_count for each in (*used, loser)] == [0, 0, 1]  # type: ignore[attr-defined]


def test_the_reasons_of_all_transports_are_told() -> None:
    device = torch.device("cpu")
    known, transfer = Agreement(2), agreement.Transfer(8, 8, torch.float32, device)
    made = {name: Fake(name, f"no {name}") for name in agreement.transports.TRANSPORTS}
    known.transports = {(name, device): each for name, each in made.items()}
    with pytest.raises(UnsupportedError, match=r"c10d: no c10d\n  ring_product: no ring.*\n  peer_kernel: no peer"):
        known._able("auto", transfer, mock.Mock())
    made["ring_product"].reason = None
    assert known._able("auto", transfer, mock.Mock()) == [made["ring_product"]]
    with pytest.raises(UnsupportedError, match=r"call:\n  c10d: no c10d$"):
        known._able("c10d", transfer, mock.Mock())


def test_given_blocks_are_tried_by_every_transport_that_serves_them() -> None:
    problem = mock.Mock(total_q=24, dtype=torch.float32, device=torch.device("cpu"))
    key = agreement.Key(problem, 8, False, "auto", "auto", (9, 15))
    known, able = Agreement(2), [Fake("one"), Fake("two")]
    with (
        mock.patch.object(known, "_able", return_value=able) as asked,
        mock.patch.object(agreement, "Trial") as trial,
    ):
        trial.return_value.winners.return_value = (1, 0)
        agreed = known._agree(key, mock.Mock(), mock.Mock())
    assert [each.partition.rows for each in trial.call_args.args[0]] == [(9, 15), (9, 15)]
    assert (agreed.eager.transport, agreed.graph.transport) == (able[1], able[0])
    assert asked.call_args.args[1].num_blocks == 2
