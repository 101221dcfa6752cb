"""Positions of the tokens of a cache, written independently of the reference and the backends."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Unused entries of a block table are far out of range, so that reading the page crashes instead of finding zeros.
UNUSED_PAGE = 2147480000


class Cache(abc.ABC):
    """The first two axes of k_cache and v_cache."""

    capacity: int  # tokens that each sequence has room for
    shape: tuple[int, int]  # sizes of the first two axes
    index: Tensor | None  # block_table or cache_batch_idx

    @abc.abstractmethod
    def slot(self, sequence: int, position: int) -> tuple[int, int]:
        """Indices of the first two axes for one position of a sequence."""

    def slots(self, spans: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Indices of the first two axes for the positions start to end - 1 of each sequence, span after span."""
        slots = [
            self.slot(sequence, position)
            for sequence, (start, end) in enumerate(spans)
            for position in range(start, end)
        ]
        first, second = torch.tensor(slots, dtype=torch.int64, device="cpu").reshape(-1, 2).unbind(1)
        return first, second


class Rows(Cache):
    """A dense cache: one row a sequence, or rows chosen among more by cache_batch_idx."""

    def __init__(self, batch_size: int, capacity: int, batch_idx: bool, generator: torch.Generator) -> None:
        self.capacity = capacity
        self.shape = (batch_size + 2 if batch_idx else batch_size, capacity)
        chosen = torch.randperm(batch_size + 2, generator=generator, device="cpu")[:batch_size]
        self.index = chosen.to(torch.int32) if batch_idx else None
        self._rows: list[int] = chosen.tolist() if batch_idx else list(range(batch_size))

    def slot(self, sequence: int, position: int) -> tuple[int, int]:  # noqa: D102
        return self._rows[sequence], position


class Pages(Cache):
    """A paged cache: pages in random order, two of which belong to no sequence.

    lengths: tokens of each sequence, including those to be appended.
    needed: capacity of a sequence at least; rounded up to whole pages.
    shared: leading pages that all sequences have in common.
    """

    def __init__(self, lengths: Sequence[int], size: int, needed: int, shared: int, generator: torch.Generator) -> None:
        width = -(-needed // size)
        pages_used = [-(-length // size) for length in lengths]
        self.capacity = width * size
        self.shape = (sum(pages_used) + 2, size)
        free = torch.randperm(self.shape[0], generator=generator, device="cpu").tolist()
        prefix = [free.pop() for _ in range(min((shared, *pages_used)))]
        self._pages = [prefix + [free.pop() for _ in range(used - len(prefix))] for used in pages_used]
        # Rows are further apart than they are long, as in a table with room for more pages.
        self.index = torch.full((len(lengths), width + 3), UNUSED_PAGE, dtype=torch.int32, device="cpu")[:, :width]
        for row, pages in zip(self.index, self._pages, strict=True):
            row[: len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")

    def slot(self, sequence: int, position: int) -> tuple[int, int]:  # noqa: D102
        size = self.shape[1]
        return self._pages[sequence][position // size], position % size
