"""This folder is not a package: one named `cuda` would hide NVIDIA's. Its neighbours are found through sys.path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from conformance.threads import one_torch_thread


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    with one_torch_thread():
        yield
