"""Calls on another device than the CPU, where their tensors are drawn."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from conformance.calls import WRITTEN, Call
from conformance.engines import Engine


class GpuEngine(Engine):
    """A backend on calls that are moved to the first GPU."""

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        on_device = moved(call, "cuda")
        out, lse = on_device.run(self.backend)
        copied_back(call, on_device)
        return out.cpu(), lse.cpu()

    def run_differentiably(self, call: Call) -> tuple[Tensor, Tensor]:
        """`run` so that gradients come back to the tensors of the call."""
        copies = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.arguments.items()}
        out, lse = replace(call, arguments=copies).run(self.backend)
        return out.cpu(), lse.cpu()

    def run_without_lse(self, call: Call) -> Tensor:
        return moved(call, "cuda").run_without_lse(self.backend).cpu()


def moved(call: Call, device: str) -> Call:
    """The same call with its tensors on `device`."""
    memories: dict[tuple[int, torch.dtype], Tensor] = {}
    arguments = {
        name: _moved(value, device, memories) if isinstance(value, Tensor) else value
        for name, value in call.arguments.items()
    }
    return replace(call, arguments=arguments)


def copied_back(call: Call, from_device: Call) -> None:
    """Writes the memory of a moved call's caches into the tensors of the call on the CPU."""
    for name in WRITTEN:
        if name in call.arguments:
            _memory(call.arguments[name]).copy_(_memory(from_device.arguments[name]))


def _memory(tensor: Tensor) -> Tensor:
    """The whole memory of a tensor."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def _moved(tensor: Tensor, device: str, memories: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """The same tensor, with its strides, in a copy of its whole memory. Tensors that share memory still do."""
    key = tensor.untyped_storage().data_ptr(), tensor.dtype
    if key not in memories or tensor.numel() == 0:
        memories[key] = _memory(tensor).to(device)
    return memories[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
