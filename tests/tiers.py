"""The three tiers of tests, and how many combinations of a list each of them runs.

`quick` is `make test`, `all` is `make test-all` and the default, `deep` is `make test-deep`. A test without a mark runs
in every tier; `slow` keeps one out of `quick`, and `deep` out of `quick` and `all`. `thin(quick=7, all=3)` is for tests
with many parameters: below the deep tier every seventh or third set of them runs, and more until every value of a
parameter with few has run. A number that shares no factor with the lengths of the lists lets most pairs of values meet.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import pytest

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")

FEW_VALUES = 2  # of a parameter, both of which run; of one that has more, if as many sets of parameters run

slow = pytest.mark.slow
deep = pytest.mark.deep
thin = pytest.mark.thin


class Tier(IntEnum):
    """Each tier includes those before it."""

    QUICK = 0
    ALL = 1
    DEEP = 2


def tier_of(config: pytest.Config) -> Tier:
    """The tier of this run."""
    return Tier[config.getoption("--tier").upper()]


def select(items: Sequence[pytest.Item], tier: Tier) -> list[pytest.Item]:
    """The tests that a tier runs."""
    kept: set[int] = set()
    for _, group in itertools.groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        sets = [item for item in group if _lowest_tier(item) <= tier]
        thinning = sets[0].get_closest_marker("thin") if sets else None
        step = thinning.kwargs.get(tier.name.lower(), 1) if thinning else 1
        kept.update(id(item) for item in (sets if step == 1 else _thinned(sets, step)))
    return [item for item in items if id(item) in kept]


def _lowest_tier(item: pytest.Item) -> Tier:
    if item.get_closest_marker("deep"):
        return Tier.DEEP
    return Tier.ALL if item.get_closest_marker("slow") else Tier.QUICK


def _thinned(sets: Sequence[pytest.Item], step: int) -> list[pytest.Item]:
    """Every `step`-th of a test's sets of parameters, and more until every value of parameters with few has one."""
    chosen = list(range(0, len(sets), step))
    values = [_values(item) for item in sets]
    known = set[tuple[str, str]]().union(*values)
    number = Counter(name for name, _ in known)
    missing = {value for value in known if number[value[0]] <= max(len(chosen), FEW_VALUES)}
    missing = missing.difference(*(values[index] for index in chosen))
    while missing:
        best = max(range(len(sets)), key=lambda index: len(missing & values[index]))
        chosen.append(best)
        missing -= values[best]
    return [sets[index] for index in chosen]


def _values(item: Any) -> set[tuple[str, str]]:
    """(name, value) of every parameter."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return {(name, repr(value)) for name, value in parameters.items()}


def half(items: Sequence[A]) -> list[A]:
    """Half of a list by the Thue-Morse sequence: it keeps no step with a list in which, say, two sizes alternate."""
    return [item for i, item in enumerate(items) if i.bit_count() % 2 == 0]


def in_turn(tier: Tier, alternatives: Sequence[Sequence[A]]) -> list[A]:
    """What a tier runs of alternatives, e.g. of the dtypes of each case: all in deep, else one each, in turn.

    Every alternative is taken twice before the next: lists in which two kinds of items alternate keep no step with it.
    """
    if tier is Tier.DEEP:
        return list(itertools.chain.from_iterable(alternatives))
    return [each[i // 2 % len(each)] for i, each in enumerate(alternatives)]


def combinations(tier: Tier, firsts: Sequence[A], seconds: Sequence[B], thirds: Sequence[C]) -> list[tuple[A, B, C]]:
    """What a tier runs of a list (first, second, third), e.g. (case, engine, dtype).

    deep: the cross product. all: every first with a third of the seconds, and thirds in turn: seconds and thirds meet.
    quick: every first once, with seconds and thirds in turn.
    """
    if tier is Tier.DEEP:
        return list(itertools.product(firsts, seconds, thirds))
    if tier is Tier.ALL:
        # Which third follows the digits of i in base 3, like the Thue-Morse sequence in base 2: it keeps no step with a
        # list in which, say, two sizes alternate.
        return [
            (first, second, thirds[(i + j // 3) % len(thirds)])
            for i, first in enumerate(firsts)
            for j, second in enumerate(seconds)
            if (_digit_sum(i) + j) % 3 == 0
        ]
    return [
        (first, seconds[i % len(seconds)], thirds[(i + i // len(seconds)) % len(thirds)])
        for i, first in enumerate(firsts)
    ]


def _digit_sum(number: int) -> int:
    """Of its digits in base 3."""
    return number % 3 + _digit_sum(number // 3) if number else 0
