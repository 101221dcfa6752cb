"""The rates that one core gets on paths that cores share, by the number of busy cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import Costs
from fastattention.backends.ascend.simulator.events import Path


@dataclass(frozen=True)
class Memory:
    """Rates of one core in bytes a cycle, of its Cube and its Vector units together."""

    queries: float  # for reading queries
    keys: float  # for reading keys and values
    mask: float
    read: float  # of the port into the core
    write: float  # of the port out of it
    first_write: float  # of a workspace that the cache does not hold yet
    l2: float  # of the whole L2 cache, reads and writes together

    @property
    def capacity(self) -> Mapping[Path, float]:
        """The rate of each path."""
        return {Path.IN: self.read, Path.OUT: self.write, Path.MEMORY: self.first_write, Path.L2: self.l2}


def rate(chip: Chip, busy_cores: int, sharers: float) -> float:
    """The rate of reads from memory when `sharers` cores read the same at the same time: one fetches, others hit.

    Bytes a cycle. Each core fetches an equal share of what all of them need. So a byte costs a core its part of a
    fetch, and otherwise a hit.
    """
    fetched = 1.0 / max(sharers, 1.0)
    cycles = fetched / chip.memory_rate(busy_cores) + (1.0 - fetched) / chip.l2_read_rate
    return 1.0 / cycles


def cached(chip: Chip, costs: Costs, busy_cores: int = 1) -> Memory:
    """The rates when everything is in the L2 cache. Cores work in step, so each gets an equal share of its rate.

    A share above what a core can ask for is no limit. It is clamped, so that core counts that make no difference give
    the same Memory.
    """
    read, write = chip.l2_read_rate, chip.l2_write_rate * costs.write_share
    l2, memory = (rate / (chip.clock_hz * busy_cores) for rate in (chip.l2_bytes_per_second, chip.hbm_bytes_per_second))
    first_write = min(memory, write) if costs.first_writes else write
    return Memory(read, read, read, read, write, first_write, min(l2, read + write))
