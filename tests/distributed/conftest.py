"""Ranks for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from distributed.team import GPU_PATIENCE, MOST_GPUS, Team


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


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Team]]:
    """Ranks with a GPU each, which stay until one fails; a test after that gets others."""
    teams: list[Team] = []

    def healthy() -> Team:
        if not (teams and teams[-1].healthy):
            while teams:
                teams.pop().close()
            size = min(MOST_GPUS, torch.cuda.device_count())
            teams.append(Team(size, tmp_path_factory.mktemp("gpus"), backend="nccl", patience=GPU_PATIENCE))
        return teams[-1]

    yield healthy
    while teams:
        teams.pop().close()


@pytest.fixture
def gpus(pool: Callable[[], Team]) -> Team:
    return pool()
