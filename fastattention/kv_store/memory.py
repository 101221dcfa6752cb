"""Allocates the memory of stores."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

from fastattention.sizes import format_bytes

HUGE_PAGE = 2 << 20
# Keys and values that both begin at a page boundary are up to 8% slower to read in turns.
OFFSET = 64


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A contiguous tensor with arbitrary values.

    Large tensors on the CPU are in huge pages where Linux gives them on request. A cache is read from end to end, and
    that is a fifth to a third faster so (docs/decisions/0012-keep-kv-caches-in-huge-pages.md).
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    memory = map_huge_pages(nbytes + OFFSET)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape), offset=OFFSET).view(shape)


def map_huge_pages(nbytes: int) -> mmap.mmap:
    """Memory of this process alone, in huge pages where the system gives them on request. Raises MemoryError."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"there are no {format_bytes(nbytes)} of memory: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # advice: failing changes nothing but speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
