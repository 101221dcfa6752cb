"""Calls on another device than the CPU, where their tensors are drawn."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastattention.testing.calls import WRITTEN, Call
from fastattention.testing.memory import whole_memory


def moved(call: Call, device: str) -> Call:
    """The same call with its tensors on `device`. Gradients come back to those that require them."""
    memories: dict[tuple[int, torch.dtype], Tensor] = {}
    arguments = {
        name: tree_map_only(Tensor, lambda tensor: _moved(tensor, device, memories), value)
        for name, value in call.arguments.items()
    }
    return replace(call, arguments=arguments)


def copied_back(call: Call, from_device: Call) -> None:
    """Writes the memory of a moved call's caches into the tensors of the call on the CPU."""
    for name in WRITTEN:
        if name in call.arguments:
            whole_memory(call.arguments[name]).copy_(whole_memory(from_device.arguments[name]))


def _moved(tensor: Tensor, device: str, memories: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """The same tensor, strides and all, in a copy of its whole memory. Tensors that share memory share the copy."""
    if tensor.requires_grad:
        return tensor.to(device)
    key = tensor.untyped_storage().data_ptr(), tensor.dtype
    if key not in memories or tensor.numel() == 0:
        memories[key] = whole_memory(tensor).to(device)
    return memories[key].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
