"""Attention on the CPU, concurrent with the device: copies queries down, queues the work, copies results up."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.offload.device import Copy, CpuJob, CpuWork, Device, Event, Shared, Span
from fastattention.threads import get_num_threads

FEW_THREADS = 4


class CpuResults(NamedTuple):
    """Results of the CPU, as tensors of the device: valid from the end of `span` until the next job begins."""

    out: Tensor  # (batch_size, seqlen_q, nheads, headdim_v)
    lse: Tensor  # float32 (batch_size, nheads, seqlen_q)
    span: Span


# Prepares work from q, out and lse in CPU memory, to which q has not been copied yet, and a number of threads.
Prepare = Callable[[Tensor, Tensor, Tensor, int], CpuWork]


class CpuAttentionQueue:
    """Queues attention on the CPU through memory that both sides reach, used by one layer after another.

    Jobs of the CPU run in order, and the device has used the results of one before it sends the next queries. So the
    same memory serves all layers.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[tuple[str, tuple[int, ...]], Shared] = {}
        self._end: Event = None

    def attend(self, q: Tensor, headdim_v: int, nbytes: int, prepare: Prepare, ready: Event = None) -> CpuResults:
        """Lets the CPU attend for q, (batch_size, seqlen_q, nheads, headdim) on the device, which goes on computing.

        nbytes: bytes of CPU memory that are read; ready: the event after which they are there, because pages of a layer
            that has just moved may still be copied
        """
        batch_size, seqlen_q, nheads, headdim = q.shape
        queries = self._shared("q", (batch_size, seqlen_q, nheads, headdim), q.dtype)
        out = self._shared("out", (batch_size, seqlen_q, nheads, headdim_v), q.dtype)
        lse = self._shared("lse", (batch_size, nheads, seqlen_q), torch.float32)
        work = prepare(queries.host, out.host, lse.host, attention_threads())
        after = [event for event in (self._device.mark(), ready) if event is not None]
        span = self._device.run_on_cpu(CpuJob([Copy(queries.host, q)], work), nbytes, after)
        self._end = span.end
        return CpuResults(out.device, lse.device, span)

    def wait(self) -> None:
        """Lets the computation go on only after all jobs."""
        if self._end is not None:
            self._device.wait(self._end)

    def _shared(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Shared:
        key = (name, shape)
        if key not in self._memory:
            self._memory[key] = self._device.empty_shared(shape, dtype)
        return self._memory[key]


def attention_threads() -> int:
    """Threads of attention on the CPU: where there are many cores, one is kept for the driver and other programs."""
    available = get_num_threads()
    return available - 1 if available > FEW_THREADS else available
