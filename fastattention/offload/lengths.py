"""Tensors of sequence lengths for calls in which all sequences are equally long."""

from __future__ import annotations

import torch
from torch import Tensor

_MOST = 64  # tensors that are kept: a step asks for a few, the next one for others


class LengthTensors:
    """Tensors of lengths on the device, which all layers of a step share, so that not every call launches a kernel."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made: dict[tuple[int, int], Tensor] = {}

    def of(self, batch_size: int, length: int) -> Tensor:
        """int32 (batch_size,), all elements `length`."""
        key = (batch_size, length)
        tensor = self._made.get(key)
        if tensor is None:
            if len(self._made) >= _MOST:
                self._made.clear()
            tensor = self._made[key] = torch.full((batch_size,), length, dtype=torch.int32, device=self._device)
        return tensor
