"""GPU memory in which the CTAs of a decode meet: partial results, and counters that each decode resets to zero.

Kernels that run at the same time must not share it. Kernels of one stream never run at the same time, nor do replays of
one graph. So every stream has memory of its own, and so has every captured call.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor

from fastattention.gpu_runtime.module import is_capturing

_TOTAL = 1 << 20  # counters of a device, 4 MB
_OF_STREAM = 1 << 14
_MOST_KEPT = 1 << 23  # floats that are kept for a stream, 32 MB


class Scratch:
    """Scratch memory of one kernel at a time."""

    def __init__(self, counters: Tensor, partials: Tensor) -> None:
        self.counters, self.partials = counters, partials  # int32 zeros, and float32
        self.num_counters, self.num_floats = counters.numel(), partials.numel()
        self.counters_at, self.partials_at = counters.data_ptr(), partials.data_ptr()


class DeviceScratch:
    """Scratch memory of all streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counters: Tensor | None = None
        self._used = 0  # counters in use
        self._of_stream: dict[int, Scratch] = {}
        self._lock = threading.Lock()  # streams may have threads of their own

    def take(self, num_counters: int, num_floats: int, stream: int) -> Scratch:
        """Scratch of at least this size for a kernel on `stream`, the current one of the device."""
        known = self._of_stream.get(stream)
        if known is None or known.num_counters < num_counters or known.num_floats < num_floats or is_capturing():
            return self._take_new(num_counters, num_floats, stream)
        return known

    def _take_new(self, num_counters: int, num_floats: int, stream: int) -> Scratch:
        with self._lock:
            if is_capturing():
                return Scratch(self._cut(num_counters), self._floats(num_floats))
            if self._counters is None:
                self._counters = torch.zeros(_TOTAL, dtype=torch.int32, device=self._device)
                # This happens once: other streams will use it too.
                torch.cuda.current_stream(self._device).synchronize()
            known = self._of_stream.get(stream) or Scratch(self._cut(max(num_counters, _OF_STREAM)), self._floats(0))
            counters = known.counters if known.num_counters >= num_counters else self._cut(num_counters)
            scratch = Scratch(counters, self._floats(max(num_floats, known.num_floats)))
            self._of_stream[stream] = scratch if num_floats <= _MOST_KEPT else Scratch(counters, known.partials)
            return scratch

    def _floats(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float32, device=self._device)

    def _cut(self, count: int) -> Tensor:
        """Counters that no other stream has. Where none are left or available yet, new zeros, which take a launch."""
        if self._counters is None or self._used + count > _TOTAL:
            return torch.zeros(count, dtype=torch.int32, device=self._device)
        first, self._used = self._used, self._used + count
        return self._counters[first : self._used]


@functools.cache
def scratch_of(device_index: int) -> DeviceScratch:
    """The scratch memory of a device."""
    return DeviceScratch(torch.device("cuda", device_index))
