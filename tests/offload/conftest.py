"""What all tests of the cooperative cache run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable() -> Iterator[None]:
    """The same numbers every time, and one thread: everything is small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
