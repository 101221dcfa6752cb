"""What one core gets of the paths that cores share, from the number of cores that are busy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import Costs
from fastattention.backends.ascend.simulator.events import Path


@dataclass(frozen=True)
class Memory:
    """Bytes a cycle of one core: its Cube and its Vector units together."""

    queries: float  # reading them
    keys: float  # and values
    mask: float
    read: float  # of the port into the core
    write: float  # of the port out of it
    first_write: float  # of a workspace that the cache does not hold yet
    l2: float  # of the whole L2 cache, reads and writes together

    @property
    def capacity(self) -> Mapping[Path, float]:
        """Of each path."""
        return {Path.IN: self.read, Path.OUT: self.write, Path.MEMORY: self.first_write, Path.L2: self.l2}


def rate(chip: Chip, busy_cores: int, sharers: float) -> float:
    """Reading what memory holds, when `sharers` cores read the same at the same time: one fetches, the rest hit.

    Bytes a cycle. Everybody fetches a share of what all of them need, so that each byte costs a core its part of a
    fetch and otherwise a hit.
    """
    fetched = 1.0 / max(sharers, 1.0)
    cycles = fetched / chip.memory_rate(busy_cores) + (1.0 - fetched) / chip.l2_read_rate
    return 1.0 / cycles


def cached(chip: Chip, costs: Costs, busy_cores: int = 1) -> Memory:
    """Everything is in the L2 cache. Cores do the same at the same time, so that each gets an equal share of it.

    A share that is more than a core can ask for is no limit: it is cut, so that numbers of cores that do not differ
    make the same Memory.
    """
    read, write = chip.l2_read_rate, chip.l2_write_rate * costs.write_share
    l2, memory = (rate / (chip.clock_hz * busy_cores) for rate in (chip.l2_bytes_per_second, chip.hbm_bytes_per_second))
    first_write = min(memory, write) if costs.first_writes else write
    return Memory(read, read, read, read, write, first_write, min(l2, read + write))
