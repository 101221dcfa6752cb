"""The lists of mutants fit the code and the tests. `scripts/mutants` tells whether tests notice the mutants."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mutants
import pytest
from tiers import deep, slow

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


@slow
def test_a_selection_without_tests_is_named() -> None:
    mutant = replace(MUTANTS[0], env="main", tests=("tests/unit/test_errors.py",), words=("no such test",))
    assert mutants.empty_selections([mutant]) == [f"{mutant.name}: its selection is empty"]


class FakeCopy:
    """Breaks nothing. The first mutant waits for the second, whose tests cannot run."""

    second_ran = threading.Event()

    def __init__(self, number: int, cores: Sequence[int]) -> None:
        self.cores = cores

    def build(self) -> Path:
        return Path(__file__)

    def run(self, mutant: mutants.Mutant) -> mutants.Result:
        if mutant is MUTANTS[0]:
            assert self.second_ran.wait(60)
        elif mutant is MUTANTS[1]:
            self.second_ran.set()
            raise mutants.BrokenRunError("nothing compiles")
        return mutants.Result(mutant, "quick", "a test", 1.0)


def test_workers_give_results_in_order_and_go_on_after_a_broken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "Copy", FakeCopy)
    monkeypatch.setattr(mutants, "INTACT", tmp_path / "library")
    results = mutants.run_all(MUTANTS[:4], control=False, workers=2)
    assert [result.mutant for result in results] == MUTANTS[:4]
    assert [(result.tier, result.test) for result in results[:2]] == [("quick", "a test"), (None, "nothing compiles")]
