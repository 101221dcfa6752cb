"""Threads and environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fastattention import ArgumentError, environment, get_num_threads, set_num_threads


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    set_num_threads(None)
    torch.set_num_threads(before)


def test_threads_follow_torch_until_set() -> None:
    for count in (2, 1):
        torch.set_num_threads(count)
        assert get_num_threads() == count


def test_a_set_number_stays_whatever_torch_uses() -> None:
    set_num_threads(3)
    torch.set_num_threads(2)
    assert get_num_threads() == 3
    assert torch.get_num_threads() == 2
    set_num_threads(None)
    assert get_num_threads() == 2


@pytest.mark.parametrize("num_threads", [0, -1, 1025, True, 2.0])
def test_other_numbers_of_threads_are_refused_and_change_nothing(num_threads: Any) -> None:
    set_num_threads(2)
    with pytest.raises(ArgumentError, match=f"num_threads={num_threads} must be an integer of 1 to 1024"):
        set_num_threads(num_threads)
    assert get_num_threads() == 2


@pytest.mark.parametrize(
    ("variable", "read"),
    [("FASTATTENTION_CPU_ISA", environment.cpu_isa), ("FASTATTENTION_CPU_LIBRARY", environment.cpu_library)],
    ids=["isa", "library"],
)
def test_a_variable_is_read_when_asked_for_and_none_if_empty(
    variable: str, read: Callable[[], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    assert read() is None
    for value in ("one", "two", ""):
        monkeypatch.setenv(variable, value)
        assert read() == (value or None)


@pytest.mark.parametrize(
    ("variable", "read"),
    [
        ("FASTATTENTION_CHECK_RANGE", environment.check_float16_range),
        ("FASTATTENTION_CHECK_NUMBERS", environment.check_numbers),
    ],
    ids=["range", "numbers"],
)
def test_a_switch_is_on_or_off_and_nothing_else(
    variable: str, read: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value, expected in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(variable, value)
        assert read() is expected
    for value in ("true", "yes", " 1"):
        monkeypatch.setenv(variable, value)
        with pytest.raises(ArgumentError, match=rf"{variable}='{value}' must be 1 \(on\) or 0 \(off\)"):
            read()
