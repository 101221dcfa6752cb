"""Whether the kernels of a call may run now, or a tracer or transform follows it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from fastattention.engine.checks import is_differentiating
from fastattention.engine.kinds import check_kinds, check_readable
from fastattention.errors import ArgumentError, UnsupportedError

PLAIN_TYPES = (Tensor, torch.nn.Parameter)
transform_level = torch._C._functorch.maybe_current_level  # of torch.func; None outside
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_active_dispatch_modes = torch._C._len_torch_dispatch_stack


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast rounds on devices of a type, such as "cuda"; None where it is off, or unknown."""
    if not _is_any_autocast_enabled() or not torch.amp.is_autocast_available(device_type):
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def runs_eagerly(*tensors: object) -> bool:
    """True when kernels may read the memory of all tensors now; False when the call must stay an operator.

    It must while a call is traced or transformed by torch.func.vmap, and where the first tensor is on the meta device.
    It also must for tensor subclasses (fake tensors, DTensors and results of collectives among them), and for views
    that negate their memory. Validation deals with values that are no tensors. Within torch.func.grad and jvp a call
    runs in operations of torch, which these transforms follow, because it needs a gradient.
    """
    if is_traced():
        return False
    if transform_level() is not None:
        return is_differentiating()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) in PLAIN_TYPES:
            if tensor.is_neg():  # type: ignore[attr-defined]
                return False
        elif isinstance(tensor, Tensor):
            return False
    return not (isinstance(tensors[0], Tensor) and tensors[0].is_meta)


def require_eager(tensors: Mapping[str, object], remedy: str = "") -> None:
    """Raises unless `runs_eagerly`, naming the tensor or tracer at fault. It is for calls that are no operators.

    remedy: what to do instead, from its semicolon on
    """
    if runs_eagerly(*tensors.values()):
        with contextlib.suppress(RuntimeError):  # tensors that are not strided have no address
            if all(x.data_ptr() and not x.is_nested for x in tensors.values() if isinstance(x, Tensor)):
                return
        check_readable(tensors)
        return
    check_kinds(tensors)
    if not (is_traced() or transform_level() is not None):
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and (type(tensor) not in PLAIN_TYPES or tensor.is_meta or tensor.is_neg()):
                negated = ", a view that negates what lies in memory" if tensor.is_neg() else ""
                given = f"{type(tensor).__name__} on {tensor.device}{negated}"
                raise ArgumentError(f"{name} is {given}; it must be a plain tensor that holds data{remedy}")
    raise UnsupportedError(
        "the call is being traced, by torch.compile, torch.jit, torch.func or a dispatch mode, which it does not serve"
        + remedy
    )


def is_traced() -> bool:
    """True under torch.compile, torch.jit.trace and any active dispatch mode."""
    return torch.compiler.is_compiling() or _active_dispatch_modes() > 0 or torch._C._get_tracing_state() is not None
