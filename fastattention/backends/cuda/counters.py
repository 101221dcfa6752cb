"""Counters in GPU memory that every kernel leaves at zero for the next one.

Kernels that run at the same time must not share them. Those of one stream never do, nor do replays of one graph: a
stream has counters of its own, and so has every call that is captured.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

_TOTAL = 1 << 20  # counters of a device: 4 MB
_OF_STREAM = 1 << 14


class Counters:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Tensor | None = None
        self._used = 0
        self._of_stream: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # of all that `_cut` gives away: streams may have threads of their own

    def take(self, count: int, stream: int) -> Tensor:
        """`count` counters for a kernel on a stream, the current one of the device."""
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                return self._cut(count)
        known = self._of_stream.get(stream)
        return self._take_new(count, stream) if known is None or known.numel() < count else known

    def _take_new(self, count: int, stream: int) -> Tensor:
        with self._lock:
            if self._memory is None:
                self._memory = torch.zeros(_TOTAL, dtype=torch.int32, device=self._device)
                # Once: other streams will use it too.
                torch.cuda.current_stream(self._device).synchronize()
            known = self._of_stream[stream] = self._cut(max(count, _OF_STREAM))
            return known

    def _cut(self, count: int) -> Tensor:
        """Counters that nobody else has; where none are left, or none can be had yet, zeros that this call pays for."""
        if self._memory is None or self._used + count > _TOTAL:
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        first, self._used = self._used, self._used + count
        return self._memory[first : self._used]


@functools.cache
def counters_of(device_index: int) -> Counters:
    """Those of a device."""
    return Counters(torch.device("cuda", device_index))
