"""Times strategies of a call: each runs a few times on all ranks, eagerly and as a CUDA graph would replay it.

They include one block by each transport, so no call is slower than that by more than noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.distributed import ProcessGroup

from fastattention.distributed.object_collectives import largest
from fastattention.distributed.row_blocks import AttentionOutProj, Strategy
from fastattention.distributed.transports import Transfer

ROUNDS, FIRST_ROUNDS = 5, 3
CALLS, SHORT_CALLS = 4, 8  # calls in a row, as of the layers of a model; SHORT_CALLS for calls that are not divided
FINALISTS = 2  # strategies of one block, and as many of several
# Least gain of several blocks over one. It is smaller in graphs: they have no launches, which vary with the load of the
# host.
LEAST_GAIN, LEAST_GRAPH_GAIN = 0.03, 0.01
LONG_SECONDS = 5e-3  # launches of a longer call are enqueued well ahead, and cost nothing either
BUSY = 1.3  # how much longer launches take on a busy host; runs of one call have differed by that
AHEAD_CYCLES = 20_000_000  # GPU cycles, some 10 ms: longer than enqueueing the launches of a few calls takes


Timer = Callable[[Callable[[], object], torch.device], float]


class Trial:
    """A trial of strategies of one call, at least one of which has one block. All methods are collective."""

    def __init__(
        self, strategies: Sequence[Strategy], call: AttentionOutProj, transfer: Transfer, group: ProcessGroup
    ) -> None:
        """Allocates a second result."""
        self._strategies, self._call, self._group, self._device = strategies, call, group, transfer.device
        self._out = call.inputs.q.new_empty(transfer.rows, transfer.hidden)
        self._is_whole = [len(one.partition.rows) == 1 for one in strategies]
        self._calls = SHORT_CALLS if all(self._is_whole) else CALLS

    def winners(self) -> tuple[int, int]:
        """The indices of the fastest strategies, eagerly and in a graph, the same on all ranks."""
        everyone = range(len(self._strategies))
        self._seconds(graph_seconds, everyone, rounds=1)  # compiles, and takes memory
        first = self._seconds(graph_seconds, everyone, rounds=1)
        if self._device.type != "cuda":
            winner = self._winner(eager_seconds, first, LEAST_GAIN)
            return winner, winner
        if min(first.values()) >= LONG_SECONDS * self._calls:
            winner = self._winner(graph_seconds, first, LEAST_GRAPH_GAIN)
            return winner, winner
        eager = self._seconds(eager_seconds, everyone, FIRST_ROUNDS)
        graph = self._seconds(graph_seconds, everyone, FIRST_ROUNDS)
        return self._winner(eager_seconds, eager, LEAST_GAIN), self._winner(graph_seconds, graph, LEAST_GRAPH_GAIN)

    def _winner(self, timer: Timer, first: dict[int, float], least_gain: float) -> int:
        """The winner of the last round. first: seconds by which its finalists are chosen."""
        ranked = sorted(first, key=first.__getitem__)
        wholes = [place for place in ranked if self._is_whole[place]][:FINALISTS]
        divided = [place for place in ranked if not self._is_whole[place]][:FINALISTS]
        seconds = self._seconds(timer, [*wholes, *divided], ROUNDS)
        least = min((seconds[place] for place in wholes), default=math.inf)  # none where blocks are given
        fastest = min([*divided, *wholes], key=seconds.__getitem__)
        if fastest in divided and seconds[fastest] < (1.0 - least_gain) * least:
            return fastest
        return min(wholes, key=seconds.__getitem__)

    def _seconds(self, timer: Timer, places: Sequence[int], rounds: int) -> dict[int, float]:
        """Seconds of some strategies, timed in turns: the median of the rounds on the slowest rank."""
        times: dict[int, list[float]] = {place: [] for place in places}
        for _ in range(rounds):
            for place, found in times.items():
                found.append(timer(lambda place=place: self._run(place), self._device))  # type: ignore[misc]
        slowest = largest([median(found) for found in times.values()], self._device, self._group)
        return dict(zip(times, slowest, strict=True))

    def _run(self, place: int) -> None:
        for _ in range(self._calls):
            self._strategies[place].run(self._call, self._out)


def eager_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work` with its launches, as on a busy host: they count where the device waits for them."""
    _synchronize(device)
    start = time.perf_counter()
    work()
    launched = time.perf_counter()
    _synchronize(device)
    return max(time.perf_counter() - start, BUSY * (launched - start))


def graph_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of `work` with all launches enqueued before the first runs, as in a graph; off a GPU, `eager_seconds`."""
    if device.type != "cuda":
        return eager_seconds(work, device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _synchronize(device: torch.device) -> None:
    """Waits for the current stream alone, so that sums on other streams go on."""
    if device.type != "cpu":
        getattr(torch, device.type).current_stream(device).synchronize()
