"""What the ways to make a call really take: each is run a few times on all ranks, and the fastest is taken.

Predictions choose the blocks; whether these are worth it, launches and all, only a trial tells. One block by each
transport is among the candidates, so that no call is slower than that by more than noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from fastattention.distributed.blocks import AttentionAhead, AttentionLinear
from fastattention.distributed.exchange import largest
from fastattention.distributed.plan import LEAST_GAIN
from fastattention.distributed.ring_order import joined
from fastattention.distributed.timing import busy_seconds, called_seconds, queued_seconds
from fastattention.distributed.transports import Transfer, Transport

ROUNDS, FIRST_ROUNDS = 5, 3
CALLS, SHORT_CALLS = 4, 8  # in a row, as the layers of a model come; of calls that are not worth dividing
FINALISTS = 2  # of one block, and as many of several
# As LEAST_GAIN, of graphs: there are no launches, which take a busy host longer, and trials that are repeated agree.
LEAST_CAPTURED_GAIN = 0.01
LONG_SECONDS = 5e-3  # of a call: its launches are enqueued long before their turn comes, and cost nothing either


class Candidate(NamedTuple):
    """Rows of each block, who sums them, and which of the transport's rooms it has for that."""

    rows: tuple[int, ...]
    transport: Transport
    room: int = 0
    attended: tuple[int, ...] = ()  # rows of which attention is computed at once: of several blocks; empty: of each

    def run(self, call: AttentionLinear, out: torch.Tensor) -> None:
        """Fills `out` (rows, hidden) with the sum over all ranks. Collective."""
        # Ranks ask for shares of a block in different orders. Attention of all of it comes in one step on all of them.
        attended = self.attended or (joined(self.rows) if self.transport.asks_for_shares else ())
        compute = AttentionAhead(call, attended).compute if attended else call.compute
        self.transport.run(compute, out, self.rows, self.room)


class Winners(NamedTuple):
    """The fastest candidate of a call, by its place: as it is called, and as a CUDA graph replays it."""

    called: int
    captured: int


Timer = Callable[..., float]  # one of timing.py


class Trial:
    """Candidates of one call, of which one or more have one block. All methods are collective."""

    def __init__(
        self, candidates: Sequence[Candidate], call: AttentionLinear, transfer: Transfer, group: ProcessGroup
    ) -> None:
        """Takes the memory of a second result."""
        self._candidates, self._group, self._device = candidates, group, transfer.device
        out = call.inputs.q.new_empty(transfer.rows, transfer.hidden)
        self._calls = CALLS if any(len(candidate.rows) > 1 for candidate in candidates) else SHORT_CALLS
        self._works = [partial(_run, call, out, candidate, self._calls) for candidate in candidates]

    def winners(self) -> Winners:
        """The fastest, the same on all ranks. Several blocks must gain LEAST_GAIN or LEAST_CAPTURED_GAIN over one."""
        everyone = range(len(self._candidates))
        first = self._seconds(queued_seconds, everyone, rounds=1, warm_up=True)
        if self._device.type == "cpu":
            winner = self._winner(called_seconds, first, LEAST_GAIN)
            return Winners(winner, winner)
        if min(first.values()) >= LONG_SECONDS * self._calls:
            winner = self._winner(queued_seconds, first, LEAST_CAPTURED_GAIN)
            return Winners(winner, winner)
        called = self._seconds(busy_seconds, everyone, FIRST_ROUNDS)
        queued = self._seconds(queued_seconds, everyone, FIRST_ROUNDS)
        return Winners(
            self._winner(busy_seconds, called, LEAST_GAIN), self._winner(queued_seconds, queued, LEAST_CAPTURED_GAIN)
        )

    def _winner(self, timer: Timer, first: dict[int, float], least_gain: float) -> int:
        """first: seconds by which some come into the last round; least_gain: of several blocks."""
        return self._fastest(self._seconds(timer, self._finalists(first), ROUNDS), least_gain)

    def _seconds(self, timer: Timer, places: Sequence[int], rounds: int, warm_up: bool = False) -> dict[int, float]:
        """Of some candidates, in turns: the median of the rounds on the slowest rank."""
        times: dict[int, list[float]] = {place: [] for place in places}
        for _ in range(rounds):
            for place, found in times.items():
                found.append(timer(self._works[place], self._device, warm_up=warm_up, rounds=1))
        slowest = largest([median(found) for found in times.values()], self._device, self._group)
        return dict(zip(times, slowest, strict=True))

    def _finalists(self, seconds: dict[int, float]) -> list[int]:
        """The fastest of one block, and the fastest of several."""
        ranked = sorted(seconds, key=seconds.__getitem__)
        kinds = ([place for place in ranked if self._is_whole(place) is whole] for whole in (True, False))
        return [place for kind in kinds for place in kind[:FINALISTS]]

    def _fastest(self, seconds: dict[int, float], least_gain: float) -> int:
        whole = min(filter(self._is_whole, seconds), key=seconds.__getitem__)
        divided = min(seconds.keys() - {*filter(self._is_whole, seconds)}, key=seconds.__getitem__, default=whole)
        return divided if seconds[divided] < (1.0 - least_gain) * seconds[whole] else whole

    def _is_whole(self, place: int) -> bool:
        return len(self._candidates[place].rows) == 1


def _run(call: AttentionLinear, out: torch.Tensor, candidate: Candidate, calls: int) -> None:
    for _ in range(calls):
        candidate.run(call, out)
