"""Fixtures of all tests of the cooperative cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastattention.offload import memory


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes buffers small: otherwise half of these tiny budgets would be buffers that hold a whole layer."""
    monkeypatch.setattr(memory, "STAGING_SHARE", 8)


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """Uses the same random values every time, and one thread, because everything is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
