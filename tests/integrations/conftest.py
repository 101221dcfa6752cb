from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import fastattention.integrations.transformers  # noqa: F401  (registers "fast_attention")

if TYPE_CHECKING:
    from integrations.serving_models import Served


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


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of words t3, t4, ..., for the tests of the server."""
    from word_model import save_word_model

    from integrations.serving_models import SHAPE, VOCABULARY

    path = tmp_path_factory.mktemp("model")
    save_word_model(path, VOCABULARY, **SHAPE)
    return path


@pytest.fixture(scope="session")
def bytewise_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights whose tokens are bytes."""
    from integrations.serving_models import save_byte_model

    path = tmp_path_factory.mktemp("bytes")
    save_byte_model(path)
    return path


@pytest.fixture(scope="module")
def bytewise(bytewise_folder: Path) -> Iterator[Served]:
    """A service of that model."""
    from integrations.serving_models import serve

    found = serve(bytewise_folder)
    yield found
    found.service.engine.stop(10)
