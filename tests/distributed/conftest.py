"""Ranks for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributed.team import Team


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Four ranks that stay."""
    ranks = Team(4, tmp_path_factory.mktemp("team"))
    yield ranks
    ranks.close()


@pytest.fixture
def new_team(tmp_path: Path) -> Iterator[Callable[..., Team]]:
    """Makes ranks for tests that harm them."""
    made: list[Team] = []

    def make(size: int, timeout: float) -> Team:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Team(size, folder, timeout))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()
