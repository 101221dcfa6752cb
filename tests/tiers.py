"""The three tiers of tests, and the sampler that chooses which combinations of parameters a tier runs.

`quick` is `make test`, `all` is `make test-all` and the default, `deep` is `make test-deep`. A test without a mark runs
in every tier; `slow` keeps one out of `quick`, and `deep` out of `quick` and `all`. `sampled` is for tests with many
combinations of parameters:

    quick   every value of every parameter is seen at least once (each-value coverage)
    all     and every pair of values of two parameters, as far as the budget goes (pairwise coverage)
    deep    the whole product

A parameter whose value has `sampled_by`, such as a case of the conformance list, counts by these values: its head
dimension, its mask, its memory layout. Tests of every instruction set are sampled without a mark, so that the quick
tier does not grow with their number: each combination of their other parameters runs there on one of them.
"""

from __future__ import annotations

import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import pytest

R = TypeVar("R")

FEW = 10  # values of an axis that is paired with others; a longer one, such as 40 lengths, is a list of its own
BUDGET = 2  # `all` runs at most this many times as many combinations as `quick`
CANDIDATES, PAIR_CANDIDATES = (
    100,
    24,
)  # candidates for the next combination: more make samples smaller, and slower
MACHINE_AXES = ("isa", "engine")  # axes whose number of values depends on the machine

slow = pytest.mark.slow
deep = pytest.mark.deep
sampled = pytest.mark.sampled


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
        kept.update(id(item) for item in _selected([item for item in group if _lowest_tier(item) <= tier], tier))
    return [item for item in items if id(item) in kept]


def _lowest_tier(item: pytest.Item) -> Tier:
    if item.get_closest_marker("deep"):
        return Tier.DEEP
    return Tier.ALL if item.get_closest_marker("slow") else Tier.QUICK


def _selected(items: list[pytest.Item], tier: Tier) -> list[pytest.Item]:
    """The combinations of one test that a tier runs."""
    if len(items) < 2:
        return items
    if items[0].get_closest_marker("sampled"):
        return covering(tier, items, parameters=_parameters)
    if any(axis in _parameters(items[0]) for axis in MACHINE_AXES):
        if tier is Tier.QUICK:
            return _on_one_each(items)
        return covering(tier, items, each=_others, parameters=_parameters)
    return items


def _parameters(item: Any) -> Mapping[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _others(item: pytest.Item) -> str:
    """A test's parameters but the instruction set."""
    return repr([value for name, value in _parameters(item).items() if name not in MACHINE_AXES])


def _on_one_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Each combination of other parameters on one instruction set, which depends on the test's name and position."""
    by_others: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_others.setdefault(_others(item), []).append(item)
    name = items[0].nodeid.partition("[")[0]
    return [group[zlib.crc32(f"{name} {i}".encode()) % len(group)] for i, group in enumerate(by_others.values())]


def covering(
    tier: Tier,
    runs: Iterable[R],
    each: Callable[[R], Hashable] | None = None,
    parameters: Callable[[R], Mapping[Any, object]] = lambda run: dict(enumerate(run)),  # type: ignore[call-overload]
) -> list[R]:
    """The combinations of parameters that a tier runs, e.g. of (case, engine, dtype): the same ones every time.

    each: a value that must occur in every tier, such as the name of a case where each case is to run. It is not paired.
    parameters: the parameters of a combination, by name; by default the elements of a tuple, by position.
    """
    runs = list(runs)
    if tier is Tier.DEEP:
        return runs
    sample = _Sample([_axes(parameters(run)) for run in runs], [each(run) for run in runs] if each else None)
    sample.add_values()
    if tier is Tier.ALL:
        sample.add_pairs(BUDGET * len(sample.chosen))
    return [runs[i] for i in sorted(sample.chosen)]


def covering_paths(tier: Tier, runs: Sequence[R], path_of: Callable[[R], str]) -> list[R]:
    """Like `covering`, for kernels that take a second to compile: `all` takes every value and every path, not pairs."""
    if tier is Tier.ALL:
        return covering(Tier.QUICK, runs, parameters=lambda run: {**dict(enumerate(run)), "path": path_of(run)})
    return covering(tier, runs)


def _axes(parameters: Mapping[Any, object]) -> list[tuple[Hashable, Hashable]]:
    """(axis, value) of parameters. Values are compared by repr, because not all can be hashed."""
    found: list[tuple[Hashable, Hashable]] = []
    for name, value in parameters.items():
        axes = getattr(value, "sampled_by", None)
        found += [(name, repr(value))] if axes is None else [((name, axis), of_it) for axis, of_it in axes.items()]
    return found


class _Sample:
    """A sample of combinations, which adds one at a time: of the next candidates, the one with the most new values."""

    def __init__(self, rows: list[list[tuple[Hashable, Hashable]]], each: list[Hashable] | None) -> None:
        codes: dict[tuple[Hashable, Hashable], int] = {}
        self.values = [[codes.setdefault(value, len(codes)) for value in row] for row in rows]
        sizes = Counter(axis for axis, _ in codes)
        paired = {code for (axis, _), code in codes.items() if 1 < sizes[axis] <= FEW}
        self.paired = [[code for code in row if code in paired] for row in self.values]
        for row, name in zip(self.values, each or [], strict=each is not None):
            row.append(codes.setdefault(("each", name), len(codes)))
        self.chosen: list[int] = []
        self._seen: set[int] = set()
        self._seen_pairs: set[tuple[int, int]] = set()

    def add_values(self) -> None:
        """Adds combinations until every value is seen."""
        self._add(self._new_values, len(self.values), CANDIDATES)

    def add_pairs(self, most: int) -> None:
        """Adds combinations until every pair of values is seen, or `most` are chosen."""
        self._add(self._new_pairs, most, PAIR_CANDIDATES)

    def _new_values(self, i: int) -> int:
        return sum(code not in self._seen for code in self.values[i])

    def _new_pairs(self, i: int) -> int:
        return sum(pair not in self._seen_pairs for pair in itertools.combinations(self.paired[i], 2))

    def _add(self, gain: Callable[[int], int], most: int, num_candidates: int) -> None:
        # The order avoids patterns of lists in which, say, two sizes alternate.
        queue = sorted(set(range(len(self.values))) - set(self.chosen), key=lambda i: zlib.crc32(b"%d" % i))
        while queue and len(self.chosen) < most:
            candidates: list[tuple[int, int]] = []
            looked_at = 0
            for i in queue:
                looked_at += 1
                if new := gain(i):
                    candidates.append((new, i))
                    if len(candidates) == num_candidates:
                        break
            queue = queue[looked_at:]
            if candidates:
                best = max(candidates, key=lambda candidate: candidate[0])[1]
                self.chosen.append(best)
                self._seen.update(self.values[best])
                self._seen_pairs.update(itertools.combinations(self.paired[best], 2))
                queue[:0] = [i for _, i in candidates if i != best]
