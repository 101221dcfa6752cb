"""All ranks make the same call with the same strategy, or none begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiers import slow
from unit.plan_calls import files_of

from distributed.sums import Sum, arguments_of, check, check_repeated, run_part, run_repeated
from distributed.team import Team
from fastattention import ArgumentError, UnsupportedError
from fastattention.distributed import agreement, row_partitions
from fastattention.distributed.agreement import Agreed, Agreement, Key
from fastattention.distributed.autotune import Trial
from fastattention.distributed.row_blocks import Strategy
from fastattention.distributed.row_partitions import Partition, Recipe
from fastattention.distributed.transports import Transport
from fastattention.distributed.transports.c10d import C10d
from fastattention.testing.case import DenseCase, KvCacheCase

CASE = DenseCase(name="agreed", batch_size=2, seqlen_q=12, seqlen_k=12, causal=True)
AUTO = Sum(CASE, "auto")
LONG = Sum(replace(CASE, batch_size=2, seqlen_q=520, seqlen_k=520, nheads=1, nheads_k=1), "auto", hidden=2048)


def forget() -> None:
    """Forgets agreements, as if the group were new, but keeps communicators."""
    for known in agreement._agreements.values():
        known.agreed.clear()
        known.calls.clear()
        known._winners.clear()


@contextmanager
def small_blocks(recipes: tuple[Recipe, ...], eager: int = 1) -> Iterator[mock.Mock]:
    """Divides even small calls, by these recipes. Yields the trial, which the strategy `eager` wins."""
    with (
        mock.patch.multiple(row_partitions, LEAST_BYTES=1, LEAST_ROWS=1, CUT_ROWS=1),
        mock.patch.object(C10d, "recipes", recipes),
        mock.patch.object(Trial, "winners", autospec=True, return_value=(eager, eager)) as winners,
    ):
        yield winners


class Made(NamedTuple):
    """The strategies of calls in a new group."""

    outs: list[torch.Tensor]
    strategies: list[tuple[tuple[int, ...], str]]  # blocks and transport of each
    trials: int  # number of trials


def make(sums: list[Sum], recipes: tuple[Recipe, ...] | None = None, place: int = 1) -> Made:
    """Makes calls in a new group, with small blocks if recipes are given."""
    forget()
    tried = mock.patch.object(Trial, "winners", autospec=True, side_effect=Trial.winners)
    with tried if recipes is None else small_blocks(recipes, place) as winners:
        outs = [run_part(one) for one in sums]
    agreed = [each.eager for known in agreement._agreements.values() for each in known.agreed.values()]
    return Made(outs, [(each.partition.rows, each.transport.name) for each in agreed], winners.call_count)


@slow
@pytest.mark.parametrize(("place", "rows"), [(0, (24,)), (1, (6, 18)), (2, (12, 12))])
def test_a_call_is_made_as_the_trial_says(team: Team, place: int, rows: tuple[int, ...]) -> None:
    results = team.run(make, [AUTO], (Recipe((1, 3)), Recipe((1, 1), 1)), place)
    assert [made.strategies for made in results] == [[(rows, "c10d")]] * team.size
    check(AUTO, [made.outs[0] for made in results])


@slow
@pytest.mark.parametrize("one", [LONG, AUTO, Sum(CASE, (4, 20))], ids=["tried", "too-small", "given"])
def test_only_calls_large_enough_to_divide_are_tried(team: Team, one: Sum) -> None:
    results = team.run(make, [one])
    assert [made.trials for made in results] == [int(one is LONG)] * team.size
    [(rows, _)] = results[0].strategies
    assert [made.strategies for made in results] == [[(rows, "c10d")]] * team.size
    assert sum(rows) == one.rows
    check(one, [made.outs[0] for made in results])


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
    assert [made.trials for made in team.run(make, sums, (Recipe((1, 3)),))] == [trials] * team.size


def test_a_call_that_is_too_small_for_the_blocks_that_won_has_one(team: Team) -> None:
    sums = [alike(batch_size=1, seqlen_q=rows) for rows in (15, 12)]
    for made in team.run(make, sums, (Recipe((1,) * 14), Recipe((1, 1)))):
        assert made.strategies == [((*(1,) * 13, 2), "c10d"), ((12,), "c10d")]
        assert made.trials == 1


def kinds_of_tried(seqlens: tuple[int, int]) -> Any:
    """The magnitudes by which calls to a cache are alike, with other lengths on ranks but the first."""
    forget()
    lengths = seqlens if dist.get_rank() == 0 else (seqlens[1], seqlens[1])
    with small_blocks((Recipe((1, 3)),)):
        run_part(Sum(KvCacheCase(name="cache", cache_seqlens=lengths, seqlen_q=3), "auto"))
    return [kind[0].seqlen_k for kind, _ in agreement.agreement_of(dist.group.WORLD)._winners]  # type: ignore[index]


def test_the_lengths_of_a_cache_are_those_of_rank_0(team: Team) -> None:
    assert team.run(kinds_of_tried, (10, 34)) == [[4]] * team.size  # 2 ** 4, not the length of the longest


def run_twice(one: Sum) -> torch.Tensor:
    """Makes a call twice. The second call may communicate only sums."""
    run_part(one)
    with (
        mock.patch.object(dist, "all_gather_object", side_effect=AssertionError("communicated")),
        mock.patch.object(dist, "broadcast_object_list", side_effect=AssertionError("communicated")),
    ):
        return run_part(one)


@pytest.mark.parametrize("partition", ["auto", (5, 19)], ids=["auto", "given"])
def test_a_known_call_communicates_its_sums_alone(team: Team, partition: tuple[int, ...] | str) -> None:
    one = Sum(CASE, partition)
    check(one, team.run(run_twice, one))


@torch.no_grad()
def files_of_a_known_call(one: Sum) -> set[str]:
    function, arguments = arguments_of(one)
    function(**arguments)
    return files_of(lambda: function(**arguments))


def test_a_known_call_enters_few_files(team: Team) -> None:
    for entered in team.run(files_of_a_known_call, AUTO):
        assert {"distributed/transports/c10d.py", "backends/cpu/attention/call.py"} <= entered
        assert len(entered) <= 12, sorted(entered)


def run_refused(one: Sum, other: Sum, odd_rank: int, transport: str = "auto") -> torch.Tensor:
    with mock.patch.object(C10d, "_all_reduce", side_effect=AssertionError("a sum has begun")):
        return run_part(other if dist.get_rank() == odd_rank else one, transport=transport)


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
    ids=["shape", "mask", "partition", "auto", "dtype", "bias", "hidden"],
)
def test_ranks_that_differ_all_fail_before_any_sum_and_are_named(team: Team, other: Sum, says: tuple[str, ...]) -> None:
    team.run(forget)
    one = Sum(CASE, (4, 20))
    for error in team.outcomes(run_refused, one, other, 2):
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


@pytest.mark.parametrize("seqlen_q", [12, 1])
def test_a_call_like_an_earlier_one_is_summed_over_the_ranks(team: Team, seqlen_q: int) -> None:
    one = Sum(replace(CASE, seqlen_q=seqlen_q), "auto", bias=True)
    check_repeated(one, team.run(run_repeated, one))


def run_in_pairs(one: Sum) -> torch.Tensor:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return run_part(one, group=pairs[dist.get_rank() // 2])


def test_pairs_of_ranks_agree_and_sum_by_themselves(team: Team) -> None:
    one = Sum(CASE, (4, 20), bias=True)
    outs = team.run(run_in_pairs, one)
    check(one, outs[:2])
    assert torch.equal(outs[2], outs[3])
    assert not torch.equal(outs[0], outs[2])


# --- transports and graphs ---


@pytest.mark.parametrize(("transport", "partition"), [("ring_product", (4, 20)), ("peer_kernel", "auto")])
def test_a_transport_of_gpus_refuses_processes(team: Team, transport: str, partition: tuple[int, ...] | str) -> None:
    one = Sum(CASE, partition)
    for error in team.outcomes(run_refused, one, one, 0, transport):
        assert isinstance(error, UnsupportedError)
        reason = f"{transport}: it is for GPUs, and tensors are on cpu"
        assert str(error) == f"no transport can sum the rows of this call:\n  {reason}"


class Fake(Transport):
    """A transport that serves everything, or has a reason."""

    def __init__(self, name: str = "fake", reason: str | None = None) -> None:
        self.name, self.reason = name, reason  # type: ignore[misc]
        self.reserve, self.release = mock.Mock(), mock.Mock()  # type: ignore[method-assign]

    def why_not(self, transfer: Any) -> str | None:
        return self.reason

    def run(self, compute: Any, out: torch.Tensor, rows: tuple[int, ...]) -> None:
        raise AssertionError("run")


def strategy(name: str = "fake") -> Strategy:
    return Strategy(Fake(name), Partition((24,)))


def test_graphs_have_a_way_of_their_own_and_capture_known_calls_only() -> None:
    """After a trial everything for graphs is there, and transports that serve no call free their memory."""
    problem = mock.Mock(total_q=24, dtype=torch.float32, device=torch.device("cuda", 0))
    key, agreed, known = Key(problem, 40, False, "auto", "auto", None), Agreed(*map(strategy, "eg")), Agreement(2)
    made: Any = [*(each.transport for each in agreed), Fake("loser")]
    known.transports = {(each.name, problem.device): each for each in made}

    def agree(*_: object) -> Agreed:
        known._winners[key, ()] = ("e", 0), ("g", 0)
        return agreed

    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True) as capturing,
        mock.patch.multiple(agreement, check_serves=mock.DEFAULT, _check_same=mock.DEFAULT) as communicating,
        mock.patch.object(known, "_agree", agree),
    ):
        with pytest.raises(ArgumentError, match=r"cannot be captured in a CUDA graph.*once before"):
            known.of(key, mock.Mock(), mock.Mock())
        communicating["_check_same"].assert_not_called()
        capturing.return_value = False
        for _ in range(2):
            assert known.of(key, mock.Mock(), mock.Mock()) is agreed.eager
        capturing.return_value = True
        assert known.of(key, mock.Mock(), mock.Mock()) is agreed.graph
    assert [each.reserve.call_args_list for each in made] == [[], [mock.call(24 * 4 * 40)], []]
    assert [each.release.call_count for each in made] == [0, 0, 1]


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
    key = Key(problem, 8, False, "auto", "auto", (9, 15))
    known, able = Agreement(2), [Fake("one"), Fake("two")]
    with mock.patch.object(known, "_able", return_value=able) as asked, mock.patch.object(agreement, "Trial") as trial:
        trial.return_value.winners.return_value = (1, 0)
        agreed = known._agree(key, mock.Mock(), mock.Mock())
    assert [each.partition.rows for each in trial.call_args.args[0]] == [(9, 15), (9, 15)]
    assert (agreed.eager.transport, agreed.graph.transport) == (able[1], able[0])
    assert asked.call_args.args[1].num_blocks == 2
