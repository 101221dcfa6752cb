"""LengthReport: kernels tell the host of lengths that a cache has no room for, and nobody waits for them.

The host does not know cache_seqlens on a GPU in time: reading them synchronizes, and a CUDA graph cannot be captured.
So a kernel makes the results of such a sequence NaN, leaves its cache alone, and writes one word into page-locked host
memory. The next call with a cache reads this word, and raises.
"""

from __future__ import annotations

import ctypes

import torch

from fastattention.errors import ArgumentError


class LengthReport:
    """The last length that did not fit, of all calls and graphs that were given its address."""

    def __init__(self, device_type: str) -> None:
        self._memory = torch.zeros(1, dtype=torch.int64, pin_memory=device_type == "cuda", device="cpu")
        self.address = self._memory.data_ptr()
        self._word = ctypes.c_uint64.from_address(self.address)

    def check(self) -> None:
        """Raises ArgumentError if a kernel has reported a length, and forgets it."""
        word = self._word.value
        if word == 0:
            return
        self._word.value = 0
        sequence, length = (word & 0xFFFFFFFF) - 1, ctypes.c_int32(word >> 32).value
        raise ArgumentError(
            f"cache_seqlens[{sequence}]={length} of an earlier call is not within its cache: nothing was appended to "
            "that sequence, and its results are NaN. With the new tokens a length may reach the capacity of the cache, "
            "the pages of block_table and the rows of rotary_cos; it must be at least cache_leftpad. "
            "FASTATTENTION_CHECK_NUMBERS=1 raises in the call itself"
        )
