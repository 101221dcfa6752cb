"""Interleaved timing, on a clock that only the calls move."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from fastattention.cli.bench import timing

from .conftest import HostEvent


class Clock:
    """Calls that take given times, and the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def make(self, name: str, *seconds: float) -> Callable[[], None]:
        """The last of `seconds` repeats."""
        left = list(seconds)

        def call() -> None:
            self.order.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now, sleep=lambda seconds: None))
    return clock


def test_peers_take_turns(clock: Clock) -> None:
    timing.interleaved({"a": clock.make("a", 1.0), "b": clock.make("b", 2.0)}, seconds=9.0)
    assert clock.order == ["a", "b"] * 4  # once to know how long they take, then three rounds of three seconds


def test_median_ignores_the_first_call_and_one_disturbance(clock: Clock) -> None:
    result = timing.interleaved({"a": clock.make("a", 5.0, 1.0, 1.0, 40.0, 1.0, 1.0)}, seconds=25.0)["a"]
    assert result == timing.Timing(1.0, 1.0, 1.0, 5)


def test_short_calls_repeat_within_a_turn_and_their_first_is_not_counted(clock: Clock) -> None:
    result = timing.interleaved({"a": clock.make("a", timing.TURN_SECONDS / 4)}, seconds=0.01)["a"]
    assert result.calls == 4 * timing.MINIMUM_ROUNDS
    assert len(clock.order) == 1 + 5 * timing.MINIMUM_ROUNDS


def test_a_peer_slower_than_the_time_given_is_measured_once(clock: Clock) -> None:
    results = timing.interleaved({"slow": clock.make("slow", 50.0), "fast": clock.make("fast", 1.0)}, seconds=4.0)
    assert results["slow"] == timing.Timing(50.0, 50.0, 50.0, 1)
    assert results["fast"].calls == 4
    assert clock.order.count("slow") == 1


def test_calls_on_a_device_take_turns_in_an_order_of_their_own(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostEvent, "clock", lambda _: clock.now)
    monkeypatch.setattr(torch.mps, "Event", HostEvent, raising=False)
    calls = {name: clock.make(name, 9.0, 9.0, seconds) for name, seconds in {"a": 1.0, "b": 2.0}.items()}
    assert timing.interleaved_on_device(calls, rounds=8, calls_per_turn=3, device="mps") == {"a": 1.0, "b": 2.0}
    turns = "".join(clock.order[4:])
    rounds = {turns[first : first + 6] for first in range(0, len(turns), 6)}
    assert rounds == {"aaabbb", "bbbaaa"}


def test_progress_ends_at_one(clock: Clock) -> None:
    told: list[float] = []
    timing.interleaved({"a": clock.make("a", 1.0)}, 5.0, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
