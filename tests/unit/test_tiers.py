"""What each tier of tests runs of a list."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import Tier, combinations, half, in_turn, select

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


def test_half_of_a_list_has_every_part_of_what_alternates() -> None:
    assert len(half(range(64))) == 32
    for step in range(2, 5):
        assert {i % step for i in half(range(64))} == set(range(step))


def test_alternatives_take_turns_below_the_deep_tier() -> None:
    lists = [[(case, dtype) for dtype in DTYPES[: 1 if case == 7 else 3]] for case in CASES]  # one has a single dtype
    assert in_turn(Tier.DEEP, lists) == list(itertools.chain.from_iterable(lists))
    for tier in (Tier.QUICK, Tier.ALL):
        chosen = in_turn(tier, lists)
        assert [case for case, _ in chosen] == list(CASES)
        assert set(chosen) <= set(itertools.chain.from_iterable(lists))
        for parity in (0, 1):  # of whatever alternates in the list of cases
            assert {dtype for case, dtype in chosen if case % 2 == parity} == set(DTYPES)


def item(name: str, params: dict[str, Any] | None = None, **marks: dict[str, int]) -> Any:
    markers = {mark: SimpleNamespace(kwargs=kwargs) for mark, kwargs in marks.items()}
    return SimpleNamespace(nodeid=name, get_closest_marker=markers.get, callspec=SimpleNamespace(params=params or {}))


def test_thinning_leaves_out_no_value_of_a_parameter_with_few() -> None:
    sets = [
        {"case": case, "engine": engine, "dtype": dtype} for case in range(20) for engine in ENGINES for dtype in DTYPES
    ]
    items = [item(f"thin[{i}]", params, thin={"all": 6}) for i, params in enumerate(sets)]  # and 6 divides 18
    chosen = [each.callspec.params for each in select(items, Tier.ALL)]
    assert {params["engine"] for params in chosen} == set(ENGINES)
    assert {params["dtype"] for params in chosen} == set(DTYPES)
    assert len(items) / 6 <= len(chosen) <= len(items) / 6 + len(ENGINES)
    alone = [item(f"features[{i}]", {"feature": i}, thin={"all": 3}) for i in range(30)]
    assert [each.callspec.params["feature"] for each in select(alone, Tier.ALL)] == list(range(0, 30, 3))


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
