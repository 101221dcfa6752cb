"""How random cases are drawn: `--hypothesis-profile=explore` looks for new ones; the default repeats the same ones."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from conformance.threads import one_torch_thread

hypothesis.settings.register_profile("ci", max_examples=150, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="package", autouse=True)
def one_thread_for_torch() -> Iterator[None]:
    with one_torch_thread():
        yield
