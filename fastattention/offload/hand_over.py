"""Queries down to the CPU, its results up again."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.offload.device import Copy, CpuJob, CpuWork, Device, Event
from fastattention.threads import get_num_threads

FEW_THREADS = 4


class Results(NamedTuple):
    """What the CPU finds, on the device; valid from `end` on."""

    out: Tensor  # (batch_size, seqlen_q, nheads, headdim_v)
    lse: Tensor  # float32 (batch_size, nheads, seqlen_q)
    end: Event


# From q, out and lse in CPU memory, where q is not yet, and a number of threads.
Prepare = Callable[[Tensor, Tensor, Tensor, int], CpuWork]


class HandOver:
    """Pinned memory for queries and results, used by one layer after another.

    Jobs of the CPU are in order, so that the same memory serves all layers.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[tuple[str, torch.Size], Tensor] = {}
        self._end: Event = None

    def attend(self, q: Tensor, headdim_v: int, nbytes: int, prepare: Prepare, ready: Event = None) -> Results:
        """Lets the CPU attend for q, (batch_size, seqlen_q, nheads, headdim) on the device, beside its computation.

        nbytes: of CPU memory, that are read; ready: when they are there: pages of a layer that has just moved may be on
        their way
        """
        batch_size, seqlen_q, nheads, _ = q.shape
        out = q.new_empty(batch_size, seqlen_q, nheads, headdim_v)
        lse = q.new_empty(batch_size, nheads, seqlen_q, dtype=torch.float32)
        q_below, out_below, lse_below = (self._pinned(*each) for each in (("q", q), ("out", out), ("lse", lse)))
        work = prepare(q_below, out_below, lse_below, attention_threads())
        job = CpuJob([Copy(q_below, q)], work, [Copy(out, out_below), Copy(lse, lse_below)])
        after = [event for event in (self._device.mark(), ready) if event is not None]
        self._end = self._device.run_on_cpu(job, nbytes, after)
        return Results(out, lse, self._end)

    def wait(self) -> None:
        """Lets the computation go on only after all jobs."""
        if self._end is not None:
            self._device.wait(self._end)

    def _pinned(self, name: str, like: Tensor) -> Tensor:
        key = (name, like.shape)
        if key not in self._memory:
            self._memory[key] = self._device.empty_pinned(like.shape, like.dtype)
        return self._memory[key]


def attention_threads() -> int:
    """Of the attention beside a device: where there are many, one core is left to the driver and other programs."""
    available = get_num_threads()
    return available - 1 if available > FEW_THREADS else available
