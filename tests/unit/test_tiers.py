"""What each tier of tests runs of a list."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import Tier, combinations, in_turn, select

CASES, ENGINES, DTYPES = range(37), ("a", "b", "c", "d", "e", "f"), ("x", "y", "z")


def test_the_deep_tier_runs_the_cross_product() -> None:
    assert combinations(Tier.DEEP, CASES, ENGINES, DTYPES) == list(itertools.product(CASES, ENGINES, DTYPES))


def test_the_tier_all_runs_each_case_on_a_third_of_the_engines_and_lets_engines_and_dtypes_meet() -> None:
    runs = combinations(Tier.ALL, CASES, ENGINES, DTYPES)
    engines_of = [{engine for case, engine, _ in runs if case == each} for each in CASES]
    assert all(len(engines) == len(ENGINES) / 3 for engines in engines_of)
    for step in range(1, 5):  # of whatever alternates in the list of cases
        assert all(set().union(*engines_of[first::step]) == set(ENGINES) for first in range(step))
    assert {run[1:] for run in runs} == set(itertools.product(ENGINES, DTYPES))


def test_the_quick_tier_runs_each_case_once_and_lets_engines_and_dtypes_meet() -> None:
    runs = combinations(Tier.QUICK, CASES, ENGINES, DTYPES)
    assert [case for case, _, _ in runs] == list(CASES)
    assert {run[1:] for run in runs} == set(itertools.product(ENGINES, DTYPES))


def test_alternatives_take_turns_below_the_deep_tier() -> None:
    lists = [[(case, dtype) for dtype in DTYPES[: 1 if case == 7 else 3]] for case in CASES]  # one has a single dtype
    assert in_turn(Tier.DEEP, lists) == list(itertools.chain.from_iterable(lists))
    for tier in (Tier.QUICK, Tier.ALL):
        chosen = in_turn(tier, lists)
        assert [case for case, _ in chosen] == list(CASES)
        assert set(chosen) <= set(itertools.chain.from_iterable(lists))
        for parity in (0, 1):  # of whatever alternates in the list of cases
            assert {dtype for case, dtype in chosen if case % 2 == parity} == set(DTYPES)


def item(name: str, **marks: dict[str, int]) -> Any:
    markers = {mark: SimpleNamespace(kwargs=kwargs) for mark, kwargs in marks.items()}
    return SimpleNamespace(nodeid=name, get_closest_marker=markers.get)


@pytest.mark.parametrize(
    ("tier", "names"),
    [
        (Tier.QUICK, ["plain[0]", "thin[0]", "plain[1]"]),
        (Tier.ALL, ["plain[0]", "slow", "thin[0]", "thin[2]", "plain[1]"]),
        (Tier.DEEP, ["plain[0]", "slow", "deep", "thin[0]", "thin[1]", "thin[2]", "plain[1]"]),
    ],
    ids=lambda value: value.name if isinstance(value, Tier) else "",
)
def test_marks_keep_tests_out_of_tiers(tier: Tier, names: list[str]) -> None:
    items = [item("plain[0]"), item("slow", slow={}), item("deep", deep={})]
    items += [item(f"thin[{i}]", thin={"quick": 3, "all": 2}) for i in range(3)]
    assert [each.nodeid for each in select([*items, item("plain[1]")], tier)] == names
