"""The bandwidth at which a core reads, from the L2 cache or from memory."""

from __future__ import annotations

from dataclasses import dataclass

from fastattention.backends.ascend.chips import Chip


@dataclass(frozen=True)
class Memory:
    """Bytes a cycle of one core, its Cube or its two Vector units together."""

    queries: float
    keys: float  # and values
    mask: float
    workspace: float  # reads of what another unit has just written; always cached
    write: float


def rate(chip: Chip, active_cores: int, sharers: float) -> float:
    """Reading what memory holds, when `sharers` cores read the same at the same time: one fetches, the rest hit.

    Bytes a cycle. Everybody fetches a share of what all of them need, so that each byte costs a core its part of a
    fetch and otherwise a hit.
    """
    fetched = 1.0 / max(sharers, 1.0)
    cycles = fetched / chip.memory_rate(active_cores) + (1.0 - fetched) / chip.l2_read_rate
    return 1.0 / cycles


def cached(chip: Chip, write_share: float) -> Memory:
    """Everything is in the L2 cache."""
    read = chip.l2_read_rate
    return Memory(read, read, read, read, chip.l2_write_rate * write_share)
