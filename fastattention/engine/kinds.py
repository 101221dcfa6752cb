"""Kinds of tensors that no backend serves: refused by name, before a kernel would read memory that does not exist."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fastattention.errors import ArgumentError, UnsupportedError

# Arguments that calls write in place.
_WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "state")


def check_kinds(tensors: Mapping[str, object]) -> None:
    """Raises, with its name, for a tensor that is nested, not strided, a DTensor, or fake beside real ones.

    Raises ArgumentError, or UnsupportedError for a DTensor. It takes microseconds, so callers use it for traced calls,
    or once a call has failed.
    """
    given = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    for name, tensor in given.items():
        if tensor.is_nested:
            raise ArgumentError(
                f"{name} is a nested tensor; give its values() to fast_attn_varlen_func, and offsets() as cu_seqlens"
            )
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{name} has layout {tensor.layout}; it must be torch.strided, as to_dense() makes it")
        if _is_dtensor(tensor):
            raise UnsupportedError(f"{name} is a DTensor, of which no backend knows the parts; give its to_local()")
        if name in _WRITTEN and tensor.is_neg():
            raise ArgumentError(
                f"{name} is a view that negates what lies in memory, where calls write; give its resolve_neg()"
            )
    fake = [name for name, tensor in given.items() if isinstance(tensor, FakeTensor)]
    real = [name for name in given if name not in fake]
    if fake and real and torch._C._len_torch_dispatch_stack() == 0:
        raise ArgumentError(f"{fake[0]} is a fake tensor and {real[0]} is not; either all are fake, or none")


def _is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor. torch.distributed is not imported for it: whoever has a DTensor has done so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_readable(tensors: Mapping[str, object]) -> None:
    """`check_kinds`, and ArgumentError for the first tensor without memory. Explains why a call has failed."""
    check_kinds(tensors)
    if torch._C._functorch.maybe_current_level() is not None:  # there torch keeps the values of most tensors elsewhere
        return
    for name, tensor in tensors.items():
        if type(tensor) is Tensor and not tensor.is_meta and tensor.numel() and tensor.data_ptr() == 0:
            raise ArgumentError(
                f"{name} has {tensor.numel()} elements and no memory: its storage is empty, or torch keeps its numbers "
                "elsewhere; give a plain tensor"
            )
