"""Interleaved timing: candidates take turns in one process, so that noise hits all alike.

`interleaved` reads the host's clock, `interleaved_on_device` the events of a GPU or NPU, and `in_turns` keeps what
turns of any kind return.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

Name = TypeVar("Name")
Result = TypeVar("Result")

MINIMUM_ROUNDS = 3
MAXIMUM_ROUNDS = 100
# Pause between turns: the threads of the last library spin on the cores for a few milliseconds before they sleep.
SETTLE_SECONDS = 0.01
# A turn lasts at least this long, and the first of several calls is not counted: the caches hold another call's data.
TURN_SECONDS = 0.03
MAXIMUM_CALLS_PER_TURN = 1000
DEVICE_CALLS_PER_TURN = 5


@dataclass(frozen=True)
class Timing:
    """Seconds a call. `calls` is the number of measured calls; 1 means too slow for the time given."""

    median: float
    lower_quartile: float
    upper_quartile: float
    calls: int


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    seconds: float,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> dict[str, Timing]:
    """Time `calls`, already warm, in turns for about `seconds`, three rounds at least.

    A call slower than `seconds` on its own keeps its first measurement, so that one slow peer cannot stop the rest.
    on_progress: told the fraction done, 0 to 1.
    """
    samples = {name: [time_call(call)] for name, call in calls.items()}
    first = {name: taken[0] for name, taken in samples.items()}
    repeated = [name for name in calls if first[name] <= seconds]
    counts = {name: _calls_per_turn(first[name]) for name in repeated}
    round_seconds = sum(SETTLE_SECONDS + first[name] * (counts[name] + (counts[name] > 1)) for name in repeated)
    rounds = min(MAXIMUM_ROUNDS, max(MINIMUM_ROUNDS, round(seconds / max(round_seconds, 1e-9))))
    for done in range(rounds if repeated else 0):
        for name in repeated:
            samples[name] += _turn(calls[name], counts[name])
        on_progress((done + 1) / rounds)
    return {name: summarize(taken if len(taken) == 1 else taken[1:]) for name, taken in samples.items()}


def interleaved_on_device(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    calls_per_turn: int = DEVICE_CALLS_PER_TURN,
    device: str = "cuda",
) -> dict[str, float]:
    """Median seconds of a call, after two calls that are not counted.

    device: as for `time_on_device`
    """
    for call in calls.values():
        call()
        call()
    samples = in_turns({name: partial(time_on_device, calls[name], calls_per_turn, device) for name in calls}, rounds)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def median_seconds(calls: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of each call by `interleaved`, after one call that is not counted."""
    for call in calls.values():
        call()
    return {name: timing.median for name, timing in interleaved(calls, seconds).items()}


def in_turns(turns: Mapping[Name, Callable[[], Result]], rounds: int, warm_up: int = 0) -> dict[Name, list[Result]]:
    """What each turn returns in every round, after `warm_up` rounds that are not counted.

    What ran just before counts, so every round has an order of its own: the same in every process.
    """
    found: dict[Name, list[Result]] = {name: [] for name in turns}
    orders = random.Random(0)
    for done in range(warm_up + rounds):
        for name in orders.sample(list(turns), len(turns)):
            result = turns[name]()
            if done >= warm_up:
                found[name].append(result)
    return found


def time_on_device(call: Callable[[], object], count: int = 1, device: str = "cuda") -> float:
    """Seconds of one of `count` calls in a row.

    device: the name of a module of torch, whose events take the time; "cpu" for the host's clock
    """
    if device == "cpu":
        return time_call(lambda: [call() for _ in range(count)]) / count
    begin, end = (getattr(torch, device).Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3 / count


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def summarize(samples: list[float]) -> Timing:
    """Median and quartiles of seconds."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], 1)
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, lower, upper, len(samples))


def _calls_per_turn(seconds: float) -> int:
    return max(1, min(MAXIMUM_CALLS_PER_TURN, math.ceil(TURN_SECONDS / max(seconds, 1e-9))))


def _turn(call: Callable[[], object], count: int) -> list[float]:
    time.sleep(SETTLE_SECONDS)
    if count > 1:
        call()
    return [time_call(call) for _ in range(count)]
