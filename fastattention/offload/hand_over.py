"""Queries down to the CPU, its results up again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.offload.device import Device, Event
from fastattention.threads import get_num_threads, limited_threads

FEW_THREADS = 4

# Held while the CPU attends: a second call at the same time would find the threads of the cpu backend taken and run on
# one core, and the number of these threads is one for the whole process.
_cpu = threading.Lock()

# (out, lse) from queries, all in CPU memory.
Attend = Callable[[Tensor], tuple[Tensor, Tensor]]


class Handed(NamedTuple):
    """Queries on their way down."""

    q: Tensor  # in pinned memory, valid once `arrived`
    arrived: Event


class HandOver:
    """Pinned memory for queries and results, used by one layer after another.

    The CPU reads a layer's queries only once the device has reached them, and by then it has fetched the results of the
    layer before: the same memory serves all layers.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[tuple[str, torch.Size], Tensor] = {}

    def send(self, q: Tensor) -> Handed:
        """Starts copying queries, (batch_size, seqlen_q, nheads, headdim)."""
        memory = self._pinned("q", q)
        memory.copy_(q, non_blocking=True)
        return Handed(memory, self._device.mark())

    def finish(self, handed: Handed, nbytes: int, attend: Attend, ready: Event = None) -> tuple[Tensor, Tensor]:
        """(out, lse) on the device of `attend`, which reads nbytes of CPU memory, for the queries that were sent.

        ready: when that memory holds what is to be read: pages of a layer that has just moved may be on their way.
        """
        results: list[Tensor] = []

        def work() -> None:
            with _cpu, limited_threads(attention_threads()):
                attended = attend(handed.q)
            for name, result in zip(("out", "lse"), attended, strict=True):
                memory = self._pinned(name, result)
                memory.copy_(result)
                results.append(memory)

        self._device.run_on_cpu(work, nbytes, [event for event in (handed.arrived, ready) if event is not None])
        out, lse = (result.to(self._device.torch_device, non_blocking=True, copy=True) for result in results)
        return out, lse

    def _pinned(self, name: str, like: Tensor) -> Tensor:
        key = (name, like.shape)
        if key not in self._memory:
            self._memory[key] = self._device.empty_pinned(like.shape, like.dtype)
        return self._memory[key]


def attention_threads() -> int:
    """Of the attention beside a device: where there are many, one core is left to the driver and other programs."""
    available = get_num_threads()
    return available - 1 if available > FEW_THREADS else available
