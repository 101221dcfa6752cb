"""The lists of mutants fit the code and the tests. `scripts/mutants` tells whether tests notice the mutants."""

from __future__ import annotations

import re
from dataclasses import replace

import mutants
import pytest
from tiers import deep

MUTANTS = mutants.read_mutants()


def test_every_mutant_changes_text_that_occurs_once() -> None:
    assert mutants.misfits(MUTANTS) == []


@deep
def test_every_mutant_selects_a_test() -> None:
    assert mutants.empty_selections(MUTANTS) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"old": "no such text"}, "`old` occurs 0 times"),
        ({"old": "import"}, "times in"),
        ({"new": MUTANTS[0].old}, "are the same"),
        ({"file": "nowhere.py"}, "occurs 0 times in nowhere.py"),
        ({"tests": ("tests/unit/test_nothing.py",)}, "test_nothing.py does not exist"),
    ],
    ids=["no-text", "text-twice", "no-change", "no-file", "no-test"],
)
def test_a_mutant_that_no_longer_fits_is_named(changes: dict[str, str], says: str) -> None:
    (problem, *_) = mutants.misfits([replace(MUTANTS[0], **changes)])
    assert re.match(f"{MUTANTS[0].name}: .*{says}", problem)


def test_a_selection_without_tests_is_named() -> None:
    mutant = replace(MUTANTS[0], env="main", tests=("tests/unit/test_errors.py",), words=("no such test",))
    assert mutants.empty_selections([mutant]) == [f"{mutant.name}: its selection is empty"]
