"""Ranks for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.team import GPU_PATIENCE, MOST_GPUS, Team


@pytest.fixture(scope="session")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    """Four ranks that all tests share."""
    with closing(Team(4, tmp_path_factory.mktemp("team"))) as ranks:
        yield ranks


@pytest.fixture
def new_team(tmp_path: Path) -> Iterator[Callable[..., Team]]:
    """Makes ranks for tests that harm them."""
    with ExitStack() as ended:
        yield lambda size, timeout, **how: ended.enter_context(closing(Team(size, tmp_path, timeout, **how)))


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Team]]:
    """Ranks with a GPU each, which tests share until one fails; later tests get new ones."""
    with ExitStack() as ended:
        teams: list[Team] = []

        def healthy() -> Team:
            if not (teams and teams[-1].healthy):
                ended.close()
                size = min(MOST_GPUS, torch.cuda.device_count())
                made = Team(size, tmp_path_factory.mktemp("gpus"), backend="nccl", patience=GPU_PATIENCE)
                teams.append(ended.enter_context(closing(made)))
            return teams[-1]

        yield healthy


@pytest.fixture
def gpus(pool: Callable[[], Team]) -> Team:
    return pool()


@pytest.fixture
def alone() -> Iterator[None]:
    """A default group of this process by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
