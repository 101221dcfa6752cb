"""This folder is not a package: one named `cuda` would hide NVIDIA's. Its neighbours are found through sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    """Tensors are small: waking torch's threads for each costs more than it saves."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
