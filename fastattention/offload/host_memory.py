"""CPU memory that grows up to a limit, pinned so that devices copy from and to it."""

from __future__ import annotations

import math
import mmap
import weakref

import torch
from torch import Tensor

from fastattention.errors import CacheFullError
from fastattention.kv_store.memory import map_huge_pages
from fastattention.offload.device import Device
from fastattention.offload.pages import PageShape

SLAB = 256 << 20  # bytes that are pinned at once, about; takes a fraction of a second


class HostMemory:
    """Tensors of pages in address space that is reserved at once, taken from the system and pinned as they are used.

    slab_pages: pages that are pinned together; no single copy may cross the end of a slab

    Linux gives them huge pages where it can: a cache is read from end to end
    (docs/decisions/0012-keep-kv-caches-in-huge-pages.md).
    """

    def __init__(self, shape: PageShape, device: Device) -> None:
        self._device = device
        self._used = 0
        self._maps: list[Tensor] = []
        self._pinned: list[Tensor] = []
        self.slab_pages = _slab_pages(shape)
        weakref.finalize(self, _unpin, device, self._pinned).atexit = False

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor whose first axis is pages. Only pages given to `use` may be accessed."""
        count = math.prod(shape)
        nbytes = max(count * dtype.itemsize, 1)
        try:
            memory = map_huge_pages(nbytes)
        except MemoryError as error:
            raise CacheFullError(
                f"the system gives no {nbytes} bytes of address space ({error}); lower cpu_memory"
            ) from error
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[: count * dtype.itemsize].view(dtype).view(shape)
        self._maps.append(tensor)
        return tensor

    def use(self, pages: int) -> None:
        """Pins the first `pages` pages of all tensors for use. Raises CacheFullError."""
        while self._used < pages:
            self._pin([tensor[self._used : self._used + self.slab_pages] for tensor in self._maps])
            self._used += self.slab_pages

    def _pin(self, slabs: list[Tensor]) -> None:
        """Pins all of the slabs, or none."""
        done: list[Tensor] = []
        try:
            for slab in slabs:
                self._device.pin(slab)
                done.append(slab)
        except BaseException:
            _unpin(self._device, done)
            raise
        self._pinned.extend(done)


def _slab_pages(shape: PageShape) -> int:
    """Pages of a slab, about SLAB bytes, so that in no tensor a slab ends within a page of the system."""
    itemsize = shape.stored_dtype.itemsize
    row = shape.nheads_k * shape.page_size
    sizes = [row * shape.headdim * itemsize, row * shape.headdim_v * itemsize, row * torch.float32.itemsize]
    granule = max(mmap.PAGESIZE // math.gcd(size, mmap.PAGESIZE) for size in sizes)
    return max(SLAB // (max(sizes) * granule), 1) * granule


def _unpin(device: Device, pinned: list[Tensor]) -> None:
    for slab in pinned:
        device.unpin(slab)
