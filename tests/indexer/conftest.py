"""Fixtures of tests of the indexer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance.threads import one_torch_thread


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    with one_torch_thread():
        yield
