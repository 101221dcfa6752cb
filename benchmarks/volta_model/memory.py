"""Resources that the four schedulers of a multiprocessor share: shared memory, and the path to the L2 cache."""

from __future__ import annotations

from .chip import Chip


class SharedMemory:
    """Moves 128 bytes, one wavefront, a cycle. A later request may use a cycle that is left over."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._all_taken_before = 0
        self.wavefronts = 0

    def serve(self, now: float, wavefronts: int) -> int:
        """When the last of `wavefronts` has been served; the first is not served before now."""
        cycle = max(int(now), self._all_taken_before)
        for _ in range(wavefronts):
            while cycle in self._taken:
                cycle += 1
            self._taken.add(cycle)
            cycle += 1
        self.wavefronts += wavefronts
        return cycle

    def forget(self, before: int) -> None:
        """Drops records before this cycle, for which there are no more requests."""
        self._all_taken_before = before
        self._taken = {cycle for cycle in self._taken if cycle >= before}


class GlobalMemory:
    """The L2 cache as one multiprocessor sees it while all others use it in the same way."""

    def __init__(self, chip: Chip) -> None:
        self._bytes_a_cycle = chip.l2_bytes_a_cycle
        self._free = 0.0
        self.bytes = 0

    def serve(self, now: float, size: int) -> float:
        """When `size` bytes have passed, without latency."""
        self._free = max(self._free, now) + size / self._bytes_a_cycle
        self.bytes += size
        return self._free
