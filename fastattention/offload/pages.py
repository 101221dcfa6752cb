"""Page pools of keys and values: a fixed number of pages per memory, handed out, shared and taken back."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.errors import CacheFullError
from fastattention.offload.device import Device, Event
from fastattention.offload.model_shape import SCALE_BYTES


@dataclass(frozen=True)
class PageShape:
    """The contents of a page: page_size tokens of one sequence in one layer."""

    page_size: int
    nheads_k: int
    headdim: int
    headdim_v: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None  # int8 or float8_e4m3fn when quantized, with scales
    values_in_keys: bool = False  # latents: a value is the first headdim_v elements of its key, in the same memory

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype of the elements in memory."""
        return self.cache_dtype or self.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key, value and scales."""
        elements = self.headdim if self.values_in_keys else self.headdim + self.headdim_v
        scales = (2 - self.values_in_keys) * SCALE_BYTES if self.cache_dtype else 0
        return self.nheads_k * (elements * self.stored_dtype.itemsize + scales)

    @property
    def nbytes(self) -> int:
        """Bytes of a page."""
        return self.page_size * self.token_bytes


class Pages(NamedTuple):
    """Tensors of many pages, each stored heads first: every head of a page is one run of memory.

    k, v: (num_pages, page_size, nheads_k, headdim or headdim_v), with the strides of heads first
    k_scale, v_scale: float32 (num_pages, page_size, nheads_k), with such strides, or None
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that have memory of their own, with axes in the order of memory: heads before tokens."""
        shared = self.v.untyped_storage().data_ptr() == self.k.untyped_storage().data_ptr()
        for tensor in (self.k, self.k_scale) if shared else self:
            if tensor is not None:
                yield tensor.transpose(1, 2)


# Allocates a contiguous tensor, with arbitrary values, of a shape whose first axis is pages.
Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


def allocate_pages(shape: PageShape, num_pages: int, allocate: Allocate) -> Pages:
    """Tensors for num_pages pages."""
    k, *other = (
        allocate((num_pages, shape.nheads_k, shape.page_size, columns), shape.stored_dtype).transpose(1, 2)
        for columns in ([shape.headdim] if shape.values_in_keys else [shape.headdim, shape.headdim_v])
    )
    v = other[0] if other else k[..., : shape.headdim_v]
    if shape.cache_dtype is None:
        return Pages(k, v, None, None)
    k_scale, *other = (
        allocate((num_pages, shape.nheads_k, shape.page_size), torch.float32).transpose(1, 2)
        for _ in range(2 - shape.values_in_keys)
    )
    return Pages(k, v, k_scale, other[0] if other else k_scale)


class PagePool:
    """A fixed number of pages in one memory.

    name: name of the memory, and remedy: what to change when there are too few pages; both for errors
    wait: makes writers of new pages wait for an event, after which released pages are no longer read
    use: called with the number of pages, from the first one, that will be in use
    slab_pages: pages of a slab, across whose end no single copy may go; 0: no limit
    """

    def __init__(
        self,
        shape: PageShape,
        num_pages: int,
        allocate: Allocate,
        *,
        name: str,
        remedy: str,
        wait: Callable[[Event], None],
        use: Callable[[int], None] = lambda pages: None,
        slab_pages: int = 0,
    ) -> None:
        self.shape = shape
        self.num_pages = num_pages
        self.slab_pages = slab_pages or max(num_pages, 1)
        self.pages = allocate_pages(shape, num_pages, allocate)
        self._name, self._remedy, self._wait, self._use = name, remedy, wait, use
        self._free = list(range(num_pages))  # a heap: the lowest first, so that neighbours lie side by side
        self._returned: deque[tuple[Event, list[int]]] = deque()
        self._owners = [0] * num_pages
        self._reached: tuple[Tensor, Tensor | None] | None = None

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + sum(len(pages) for _, pages in self._returned)

    @property
    def used(self) -> int:
        """Pages that are taken."""
        return self.num_pages - self.available

    def reached(self, device: Device) -> tuple[Tensor, Tensor | None]:
        """Keys of tokens, (tokens of all pages, headdim), and their scales, as the device reads them over the link.

        For one key head. Pages must have been taken.
        """
        if self._reached is None:
            k, _, k_scale, _ = (None if x is None else x.flatten(0, 2) for x in self.pages)
            assert k is not None
            self._reached = device.reach(k), None if k_scale is None else device.reach(k_scale)
        return self._reached

    def check(self, count: int) -> None:
        """Raises CacheFullError unless `count` pages can be taken."""
        if count > self.available:
            page = self.shape
            raise CacheFullError(
                f"{self._name} has {self.available} free pages of {self.num_pages} ({page.page_size} tokens and "
                f"{page.nbytes} bytes each), and {count} are needed; {self._remedy}"
            )

    def take(self, count: int) -> list[int]:
        """Takes `count` pages, with arbitrary values. Raises CacheFullError."""
        self.check(count)
        while len(self._free) < count:
            event, pages = self._returned[0]
            if event is not None:
                self._wait(event)  # may fail, so the pages are not taken yet
            self._returned.popleft()
            for page in pages:
                heapq.heappush(self._free, page)
        taken = [heapq.heappop(self._free) for _ in range(count)]
        try:
            self._use(max(taken, default=-1) + 1)
        except BaseException:
            for page in taken:
                heapq.heappush(self._free, page)
            raise
        for page in taken:
            self._owners[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Adds an owner to each of the pages, who will release them too."""
        for page in pages:
            self._owners[page] += 1

    def release(self, pages: Iterable[int], after: Event | None) -> None:
        """Releases pages, which may be written again after an event, if any."""
        freed = []
        for page in pages:
            self._owners[page] -= 1
            if self._owners[page] == 0:
                freed.append(page)
        if freed:
            self._returned.append((after, freed))


def runs(pages: Sequence[int], slab_pages: int) -> Iterator[tuple[int, int, int]]:
    """(position, first page, count) of runs of neighbouring pages, none of which goes on in the next slab."""
    begin = 0
    for position in range(1, len(pages) + 1):
        end = position == len(pages)
        if end or pages[position] != pages[position - 1] + 1 or pages[position] % slab_pages == 0:
            yield begin, pages[begin], position - begin
            begin = position
