"""The three tiers of tests, and how many combinations of a list each of them runs.

`quick` is `make test`, `all` is `make test-all` and the default, `deep` is `make test-deep`. A test without a mark runs
in every tier; `slow` keeps one out of `quick`, and `deep` out of `quick` and `all`. `thin(quick=7, all=3)` is for tests
with many parameters: below the deep tier every seventh or third set of them runs. A number that shares no factor with
the lengths of the lists lets all of their values, and most pairs of them, meet.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import pytest

A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")

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
    seen: Counter[str] = Counter()  # sets of parameters, by test
    selected = []
    for item in items:
        test = item.nodeid.partition("[")[0]
        thinning = item.get_closest_marker("thin")
        step = thinning.kwargs.get(tier.name.lower(), 1) if thinning else 1
        lowest = Tier.DEEP if item.get_closest_marker("deep") else Tier.ALL if item.get_closest_marker("slow") else tier
        if lowest <= tier and seen[test] % step == 0:
            selected.append(item)
        seen[test] += 1
    return selected


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
