"""Checks of arguments that all operators share, from types, shapes, dtypes and devices alone."""

from __future__ import annotations

import numbers
import operator
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattention.errors import ArgumentError

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TensorSpec(NamedTuple):
    """The shape, dtype and device of a tensor, which checks need."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}"


def require_tensor(name: str, value: object) -> None:
    """Raises ArgumentError unless `value` is a tensor."""
    if not isinstance(value, Tensor):
        remedy = f"; give torch.from_numpy({name})" if isinstance(value, numpy.ndarray) else ""
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(value).__name__}{remedy}")


def require_tensors(**values: object) -> None:
    """Raises ArgumentError, with its name, for the first of `values` that is not a tensor."""
    for name, value in values.items():
        require_tensor(name, value)


def spec_of(name: str, value: object) -> TensorSpec:
    """The TensorSpec of a tensor; raises ArgumentError naming anything else."""
    require_tensor(name, value)
    assert isinstance(value, Tensor)
    return TensorSpec(value.shape, value.dtype, value.device)


def read_int(name: str, value: object, allowed: str = "an integer") -> int:
    """`value` as an int; raises ArgumentError naming anything that is not an integer."""
    try:
        return operator.index(_scalar(value))  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentError(f"{name} must be {allowed}, got {value!r}") from error


def read_flag(name: str, value: object) -> bool:
    """`value` as a bool; raises ArgumentError naming anything but True, False, 0 and 1."""
    value = _scalar(value)
    if not isinstance(value, (int, numpy.bool_)) or value not in (0, 1):
        raise ArgumentError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def _scalar(value: object) -> object:
    """`value`, or its number: torch.compile turns a NumPy scalar into an array without axes."""
    return value.item() if isinstance(value, numpy.ndarray) and value.ndim == 0 else value


def read_number(name: str, value: object) -> float:
    """`value` as a float; raises ArgumentError naming anything that is not a number."""
    if type(value) is float:
        return value
    value = _scalar(value)
    if not isinstance(value, numbers.Real):
        raise ArgumentError(f"{name} must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise ArgumentError(f"{name} is an integer that no float holds") from None


def check_rank(name: str, tensor: TensorSpec, axes: str) -> None:
    """Raises unless `tensor` has as many dimensions as the text `axes` has names, separated by commas."""
    if len(tensor.shape) != axes.count(",") + 1:
        raise ArgumentError(f"{name} must be ({axes}), got shape {tuple(tensor.shape)}")


def check_shape(name: str, tensor: TensorSpec, expected: tuple[int, ...], axes: str) -> None:
    """Raises unless the shape is exactly `expected`."""
    if tuple(tensor.shape) != expected:
        raise ArgumentError(f"{name} must be ({axes}) = {expected}, got shape {tuple(tensor.shape)}")


def check_device(name: str, tensor: TensorSpec, q: TensorSpec, q_name: str = "q") -> None:
    """Raises unless the device is that of q, which callers know as `q_name`."""
    if tensor.device != q.device:
        raise ArgumentError(f"{name} is on {tensor.device} and {q_name} on {q.device}; they must be on the same device")


def check_dtype(q: TensorSpec, q_name: str = "q") -> None:
    """Raises unless the dtype of q is one that calls take."""
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ArgumentError(f"{q_name} has dtype {q.dtype}; allowed are {allowed}")


def check_like_q(name: str, tensor: TensorSpec, q: TensorSpec, q_name: str = "q") -> None:
    """Raises unless dtype and device are those of q, which callers know as `q_name`."""
    if tensor.dtype is not q.dtype:
        raise ArgumentError(f"{name} has dtype {tensor.dtype} and {q_name} has {q.dtype}; they must be the same")
    check_device(name, tensor, q, q_name)


def check_index(name: str, tensor: TensorSpec, q: TensorSpec, shape: tuple[int, ...], axes: str) -> None:
    """Checks an int32 tensor of lengths or indices; -1 in `shape` matches any size."""
    if tensor.dtype is not torch.int32:
        remedy = "" if tensor.dtype.is_floating_point else f"; give {name}.int()"
        raise ArgumentError(f"{name} must be int32, got {tensor.dtype}{remedy}")
    check_device(name, tensor, q)
    sizes_fit = len(tensor.shape) == len(shape) and all(
        wanted in (-1, given) for given, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not sizes_fit:
        expected = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise ArgumentError(f"{name} must be ({axes}) = ({expected}), got shape {tuple(tensor.shape)}")


def last_axis_contiguous(tensor: Tensor) -> Tensor:
    """`tensor`, copied only when its last axis is strided; kernels take any other strides."""
    return tensor if tensor.stride()[-1] == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class Differentiation(NamedTuple):
    """How a call is differentiated: the fields of Problem that say so."""

    grads: tuple[str, ...] = ()
    in_transform: bool = False


def differentiation(**arguments: object) -> Differentiation:
    """What autograd wants of a call with these arguments, backward and forward."""
    tensors = [(name, argument) for name, argument in arguments.items() if isinstance(argument, Tensor)]
    in_transform = torch._C._functorch.maybe_current_level() is not None and is_differentiating()
    if not in_transform and forward_ad._current_level >= 0:  # within forward_ad.dual_level
        in_transform = any(forward_ad.unpack_dual(x).tangent is not None for _, x in tensors)  # type: ignore[no-untyped-call]
    records = torch.is_grad_enabled()
    return Differentiation(tuple(name for name, x in tensors if records and x.requires_grad), in_transform)


def needs_grad(*arguments: object) -> bool:
    """True when autograd wants to differentiate through a call with these arguments, backward or forward."""
    wanted = differentiation(**{str(index): argument for index, argument in enumerate(arguments)})
    return bool(wanted.grads) or wanted.in_transform


def is_differentiating() -> bool:
    """True within torch.func.grad, jvp and transforms based on them, where some followed tensors do not show it."""
    return _is_within(torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def is_functionalizing() -> bool:
    """True within torch.func.functionalize."""
    return not torch.compiler.is_compiling() and _is_within(torch._C._functorch.TransformType.Functionalize)


def _is_within(*transforms: object) -> bool:
    return any(level.key() in transforms for level in torch._C._functorch.get_interpreter_stack() or ())
