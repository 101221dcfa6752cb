"""Selects tests and the number of random cases by `--tier`: quick, all or deep (tiers.py)."""

from __future__ import annotations

import gc
import signal
import sys

import hypothesis
import pytest
from tiers import Tier, select, tier_of

# Random cases are the same every time, except in `explore`, the profile of the deep tier.
for name, examples in {"quick": 15, "all": 30}.items():
    hypothesis.settings.register_profile(name, max_examples=examples, deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", max_examples=1000, deadline=None, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    names = [tier.name.lower() for tier in Tier]
    parser.addoption("--tier", choices=names, default="all", help="tests of this tier and those below it")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: they are kept
    # In the background of a shell, tests and the processes that they start would ignore interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--hypothesis-profile") is None:
        hypothesis.settings.load_profile("explore" if tier_of(config) is Tier.DEEP else config.getoption("--tier"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    selected = select(items, tier_of(config))
    kept = {id(item) for item in selected}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = selected


def pytest_collection_finish() -> None:
    # Garbage collection, of which libraries ask often, need not visit thousands of tests.
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _compiler_without_what_others_compiled() -> None:
    """All public functions are one code object, which torch.compile compiles for a few kinds of arguments only."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
