"""Queries down to the CPU, its results up again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.offload.device import Device, Event
from fastattention.offload.layer import AttendOptions, Layer


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
        memory = self._pinned("q", q.shape, q.dtype)
        memory.copy_(q, non_blocking=True)
        return Handed(memory, self._device.mark())

    def attend(self, handed: Handed, layer: Layer, begin: int, options: AttendOptions) -> tuple[Tensor, Tensor]:
        """(out, lse) on the device of what was sent, over the tokens from `begin` on that are in CPU memory."""
        results: list[Tensor] = []

        def work() -> None:
            for name, result in zip(("out", "lse"), layer.attend_on_cpu(handed.q, begin, options), strict=True):
                memory = self._pinned(name, result.shape, result.dtype)
                memory.copy_(result)
                results.append(memory)

        # Of a layer that has just moved to CPU memory, pages may still be on their way.
        after = [event for event in (handed.arrived, layer.downloaded) if event is not None]
        self._device.run_on_cpu(work, layer.host_bytes(begin), after)
        out, lse = (result.to(self._device.torch_device, non_blocking=True, copy=True) for result in results)
        return out, lse

    def _pinned(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        key = (name, shape)
        if key not in self._memory:
            self._memory[key] = self._device.empty_pinned(shape, dtype)
        return self._memory[key]
