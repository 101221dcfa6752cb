"""What the four schedulers of a multiprocessor share: shared memory, and the way to the L2 cache."""

from __future__ import annotations

from .chip import Chip


class SharedMemory:
    """Moves 128 bytes, one wavefront, a cycle. Who asks later may be served earlier when a cycle is left over."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._all_taken_before = 0
        self.wavefronts = 0

    def serve(self, now: float, wavefronts: int) -> int:
        """When the last of so many wavefronts has been served; the first is not served before now."""
        cycle = max(int(now), self._all_taken_before)
        for _ in range(wavefronts):
            while cycle in self._taken:
                cycle += 1
            self._taken.add(cycle)
            cycle += 1
        self.wavefronts += wavefronts
        return cycle

    def forget(self, before: int) -> None:
        """Nobody will ask for a cycle before this one any more."""
        self._all_taken_before = before
        self._taken = {cycle for cycle in self._taken if cycle >= before}


class GlobalMemory:
    """The L2 cache as one multiprocessor sees it while all others use it likewise."""

    def __init__(self, chip: Chip) -> None:
        self._bytes_a_cycle = chip.l2_bytes_a_cycle
        self._free = 0.0
        self.bytes = 0

    def serve(self, now: float, size: int) -> float:
        """When so many bytes have passed, not counting latency."""
        self._free = max(self._free, now) + size / self._bytes_a_cycle
        self.bytes += size
        return self._free
