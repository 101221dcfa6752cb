"""What each tier of tests runs of a list."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from tiers import Tier, combinations, select

CASES, ENGINES, DTYPES = range(37), ("a", "b", "c", "d", "e", "f"), ("x", "y", "z")


def pairs_of(runs: list[tuple[Any, Any, Any]]) -> set[tuple[Any, Any]]:
    return {pair for run in runs for pair in itertools.combinations(run, 2)}


def test_the_deep_tier_runs_the_cross_product() -> None:
    assert combinations(Tier.DEEP, CASES, ENGINES, DTYPES) == list(itertools.product(CASES, ENGINES, DTYPES))


def test_the_tier_all_lets_every_pair_meet() -> None:
    runs = combinations(Tier.ALL, CASES, ENGINES, DTYPES)
    assert len(runs) == len(CASES) * len(ENGINES)
    assert pairs_of(runs) == pairs_of(list(itertools.product(CASES, ENGINES, DTYPES)))


def test_the_quick_tier_runs_each_case_once_and_lets_engines_and_dtypes_meet() -> None:
    runs = combinations(Tier.QUICK, CASES, ENGINES, DTYPES)
    assert [case for case, _, _ in runs] == list(CASES)
    assert {run[1:] for run in runs} == set(itertools.product(ENGINES, DTYPES))


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
