"""Instruction caches: a small one for each scheduler, in front of one that the multiprocessor shares.

Code that is larger than the small cache streams in from the shared one. A prefetcher asks for lines ahead of a warp, so
straight code waits only when all schedulers together ask for more than the shared cache gives in a cycle. A jump to a
missing line waits for it. The shared cache is assumed to hold the whole kernel.
"""

from __future__ import annotations

from collections import OrderedDict

from .chip import Chip


class SharedInstructions:
    """The output of the shared cache, limited in bytes a cycle."""

    def __init__(self, chip: Chip) -> None:
        self._cycles_of_line = chip.line_bytes / chip.fetch_width
        self._latency = chip.fetch_latency
        self._free = 0.0

    def request(self, now: float) -> float:
        """When a line arrives that is asked for now."""
        self._free = max(self._free, now) + self._cycles_of_line
        return self._free + self._latency


class Instructions:
    """One scheduler's cache, which evicts the least recently used line."""

    def __init__(self, chip: Chip, shared: SharedInstructions) -> None:
        self._shared = shared
        self._num_lines = chip.l0_bytes // chip.line_bytes
        self._ahead = chip.prefetch_lines
        self._arrivals: OrderedDict[int, float] = OrderedDict()
        self.lines_fetched = 0

    def enter(self, line: int, now: float) -> float:
        """When a warp that comes to a line now can issue from it."""
        missed = line not in self._arrivals
        ready = self._hold(line, now)
        if missed or ready > now or (line + self._ahead) not in self._arrivals:
            for ahead in range(1, self._ahead + 1):
                self._hold(line + ahead, now)
        return ready

    def _hold(self, line: int, now: float) -> float:
        arrival = self._arrivals.get(line)
        if arrival is None:
            arrival = self._shared.request(now)
            self._arrivals[line] = arrival
            self.lines_fetched += 1
            if len(self._arrivals) > self._num_lines:
                self._arrivals.popitem(last=False)
        else:
            self._arrivals.move_to_end(line)
        return arrival
