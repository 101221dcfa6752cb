"""How random cases are drawn: `--hypothesis-profile=explore` looks for new ones; the default repeats the same ones."""

from __future__ import annotations

import hypothesis
import pytest

hypothesis.settings.register_profile("ci", max_examples=150, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("ci")
