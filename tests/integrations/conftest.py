from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import fastattention.integrations.transformers  # noqa: F401  (registers "fast_attention")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread: the models are so small that starting threads would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
