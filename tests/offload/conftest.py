"""What all tests of the cooperative cache run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fastattention.offload import memory


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of these tiny budgets would be buffers that hold a layer in one piece."""
    monkeypatch.setattr(memory, "STAGING_SHARE", 8)


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """The same numbers every time, and one thread: everything is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
