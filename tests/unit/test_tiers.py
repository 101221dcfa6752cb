"""The combinations of a list that each tier of tests runs."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import BUDGET, FEW, Tier, covering, select

CASES, ENGINES, DTYPES = range(37), ("a", "b", "c", "d", "e", "f"), ("x", "y", "z")


class Shape:
    """A value that counts by its axes."""

    def __init__(self, rows: int, masked: bool) -> None:
        self.sampled_by = {"rows": rows, "masked": masked}


def values_of(runs: list[tuple[Any, ...]], axis: int) -> set[Any]:
    return {run[axis] for run in runs}


def pairs_of(runs: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for run in runs for pair in itertools.combinations(enumerate(run), 2)}


def test_the_deep_tier_runs_the_cross_product() -> None:
    every_run = list(itertools.product(CASES, ENGINES, DTYPES))
    assert covering(Tier.DEEP, every_run) == every_run


@pytest.mark.parametrize("tier", list(Tier), ids=lambda tier: tier.name)
def test_every_tier_sees_every_value(tier: Tier) -> None:
    runs = covering(tier, itertools.product(CASES, ENGINES, DTYPES))
    assert [values_of(runs, axis) for axis in range(3)] == [set(CASES), set(ENGINES), set(DTYPES)]


@pytest.mark.parametrize("sizes", [(3, 2), (5, 2), (FEW, 2), (4, 1, 2)], ids=str)
def test_the_tier_all_sees_every_pair_of_values_where_the_budget_allows(sizes: tuple[int, ...]) -> None:
    every_run = list(itertools.product(*map(range, sizes)))
    quick, runs = covering(Tier.QUICK, every_run), covering(Tier.ALL, every_run)
    assert len(quick) <= max(sizes) + 1
    assert pairs_of(runs) == pairs_of(every_run)
    assert len(runs) <= BUDGET * max(sizes)


def test_the_quick_tier_leaves_pairs_out() -> None:
    """If it did not, the test above could not fail."""
    every_run = list(itertools.product(range(4), range(3), range(3)))
    assert pairs_of(covering(Tier.QUICK, every_run)) < pairs_of(every_run)


def test_the_budget_ends_a_sample_of_pairs() -> None:
    every_run = list(itertools.product(range(FEW), range(FEW), range(2)))
    assert len(covering(Tier.ALL, every_run)) == BUDGET * len(covering(Tier.QUICK, every_run))


def test_a_long_list_meets_short_axes_whose_pairs_are_all_seen() -> None:
    runs = covering(Tier.ALL, itertools.product(CASES, ENGINES, DTYPES))
    assert len(runs) < 1.3 * len(CASES)
    assert {run[1:] for run in runs} == set(itertools.product(ENGINES, DTYPES))


def test_each_runs_once_in_the_quick_tier_and_with_every_pair_in_all() -> None:
    shapes = [Shape(rows, masked) for rows in range(8) for masked in (False, True)] * 3
    every_run = list(itertools.product(enumerate(shapes), ENGINES, DTYPES))
    runs = [(i, shape, engine, dtype) for (i, shape), engine, dtype in every_run]
    quick, paired = (covering(tier, runs, each=lambda run: f"name {run[0]}") for tier in (Tier.QUICK, Tier.ALL))
    assert sorted(run[0] for run in quick) == list(range(len(shapes)))
    assert {(run[1].sampled_by["rows"], run[2]) for run in paired} == set(itertools.product(range(8), ENGINES))


def test_a_value_with_axes_counts_by_these() -> None:
    shapes = [Shape(rows, masked) for rows in range(4) for masked in (False, True)] * 5
    every_run = list(itertools.product(shapes, DTYPES[:2]))
    quick, paired = (covering(tier, every_run) for tier in (Tier.QUICK, Tier.ALL))
    assert len(quick) == 4
    assert {shape.sampled_by["rows"] for shape, _ in quick} == set(range(4))
    found = {(*shape.sampled_by.values(), dtype) for shape, dtype in paired}
    assert pairs_of(list(found)) == pairs_of(list(itertools.product(range(4), (False, True), DTYPES[:2])))


def item(name: str, params: dict[str, Any] | None = None, *marks: str) -> Any:
    markers = {mark: SimpleNamespace(kwargs={}) for mark in marks}
    return SimpleNamespace(nodeid=name, get_closest_marker=markers.get, callspec=SimpleNamespace(params=params or {}))


@pytest.mark.parametrize(
    ("tier", "names"),
    [
        (Tier.QUICK, ["plain[0]", "sampled[0-0]", "sampled[1-1]", "plain[1]"]),
        (Tier.ALL, ["plain[0]", "slow", "sampled[0-0]", "sampled[0-1]", "sampled[1-0]", "sampled[1-1]", "plain[1]"]),
    ],
    ids=lambda value: value.name if isinstance(value, Tier) else "",
)
def test_marks_keep_tests_out_of_tiers(tier: Tier, names: list[str]) -> None:
    items = [item("plain[0]"), item("slow", None, "slow"), item("deep", None, "deep")]
    items += [item(f"sampled[{i}-{j}]", {"i": i, "j": j}, "sampled") for i in range(2) for j in range(2)]
    items.append(item("plain[1]"))
    chosen = [each.nodeid for each in select(items, tier)]
    assert len(chosen) == len(names)
    assert {name.partition("[")[0] for name in chosen} == {name.partition("[")[0] for name in names}
    assert select(items, Tier.DEEP) == items


@pytest.mark.parametrize("num_isas", [1, 2, 7])
@pytest.mark.parametrize("axis", ["isa", "engine"])
def test_the_quick_tier_does_not_grow_with_the_number_of_instruction_sets(axis: str, num_isas: int) -> None:
    items = [
        item(f"test[{isa}-{case}-{dtype}]", {axis: isa, "case": case, "dtype": dtype})
        for isa in range(num_isas)
        for case in range(20)
        for dtype in DTYPES
    ]
    quick = [each.callspec.params for each in select(items, Tier.QUICK)]
    assert sorted((run["case"], run["dtype"]) for run in quick) == list(itertools.product(range(20), DTYPES))
    assert {run[axis] for run in quick} == set(range(num_isas))
    paired = [each.callspec.params for each in select(items, Tier.ALL)]
    assert {(run["case"], run["dtype"]) for run in paired} == set(itertools.product(range(20), DTYPES))
    assert {(run[axis], run["dtype"]) for run in paired} == set(itertools.product(range(num_isas), DTYPES))
    assert len(paired) <= 1.2 * len(quick)
    assert select(items, Tier.DEEP) == items
