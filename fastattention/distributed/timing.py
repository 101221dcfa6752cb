"""How long work takes on a device, as it is called and as a CUDA graph would replay it."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch

ROUNDS = 3
BUSY = 1.3  # how much longer launches take on a host that others use too; runs of one call have differed by that
AHEAD_CYCLES = 20_000_000  # of a GPU, some 10 ms: longer than the launches of a few calls take to enqueue


def module_of(device: torch.device) -> Any:
    """torch.cuda, or what another kind of device has in its place."""
    return getattr(torch, device.type)


def synchronize(device: torch.device) -> None:
    """Waits for the current stream alone, so that sums on other streams go on."""
    if device.type != "cpu":
        module_of(device).current_stream(device).synchronize()


def called_seconds(
    work: Callable[[], object],
    device: torch.device,
    warm_up: bool = True,
    rounds: int = ROUNDS,
    at_most: float = math.inf,
    busy: float = 1.0,
) -> float:
    """Median of some rounds, launches included; of fewer, if together they take longer than `at_most`.

    busy: how many times as long launches take on the host that is meant; it counts where the device waits for them.
    """

    def once() -> float:
        synchronize(device)
        start = time.perf_counter()
        work()
        launched = time.perf_counter()
        synchronize(device)
        return max(time.perf_counter() - start, busy * (launched - start))

    if warm_up:
        work()
    return _median(once, rounds, at_most)


busy_seconds = functools.partial(called_seconds, busy=BUSY)


class Laps:
    """Times between marks on the current stream, as a CUDA graph would replay what is enqueued between them.

    On a GPU all launches are enqueued before the first lap begins, and the host waits for none: what other streams do
    goes on as it would. Elsewhere the host waits for the current stream at every mark.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        if device.type == "cuda":
            torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        self.mark()

    def mark(self) -> None:
        """Ends a lap, and begins the next."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append(event)
        else:
            synchronize(self._device)
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Of each lap. Waits for the last mark."""
        if self._device.type != "cuda":
            return [end - start for start, end in pairwise(self._marks)]
        self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._marks)]


def queued_seconds(
    work: Callable[[], object],
    device: torch.device,
    warm_up: bool = True,
    rounds: int = ROUNDS,
    at_most: float = math.inf,
) -> float:
    """Likewise with all launches enqueued before, as in a CUDA graph; off a GPU as `called_seconds`."""

    def once() -> float:
        laps = Laps(device)
        work()
        laps.mark()
        [seconds] = laps.seconds()
        return seconds

    if warm_up:
        work()
    return _median(once, rounds, at_most)


def _median(once: Callable[[], float], rounds: int, at_most: float) -> float:
    times: list[float] = []
    while not times or (len(times) < rounds and sum(times) < at_most):
        times.append(once())
    return median(times)
