"""Which tests a run selects, and how many random cases: `--tier` quick, all or deep; tiers.py says what they are."""

from __future__ import annotations

import signal

import hypothesis
import pytest
from tiers import Tier, select, tier_of

# The same random cases every time; those of `explore`, the profile of the deep tier, are new ones.
for name, examples in {"quick": 15, "all": 30}.items():
    hypothesis.settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    names = [tier.name.lower() for tier in Tier]
    parser.addoption("--tier", choices=names, default="all", help="tests of this tier and those below it")


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs tests in the background has them ignore interrupts, and so would the processes that they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("explore" if tier_of(config) is Tier.DEEP else config.getoption("--tier"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = select(items, tier_of(config))
    kept = {id(item) for item in selected}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = selected
