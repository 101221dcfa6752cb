"""Pointers and strides, in elements, of the tensors that kernels take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor

from fastattention.attention.problem import Inputs

AnyStride = TypeVar("AnyStride")
Strides = tuple[object, ...]


def strides_of(inputs: Inputs) -> Strides:
    """What parameters take from the tensors of a call, besides addresses; None for tensors that it does not have.

    Rows of the rotary tables limit what a cache may hold.
    """
    rotary_rows = None if inputs.rotary_cos is None else inputs.rotary_cos.shape[0]
    return (rotary_rows, *[None if tensor is None else (tensor.stride(), tensor.dtype) for tensor in inputs])


def pointers(*tensors: Tensor | None) -> list[int]:
    """Addresses of the first elements; 0 for a tensor that a call does not have, or that has no elements.

    Raises RuntimeError for any other tensor without memory: kernels would read from address 0.
    """
    return [0 if tensor is None else tensor.data_ptr() or null_of(tensor) for tensor in tensors]


def null_of(tensor: Tensor) -> int:
    """0, the address of a tensor that has no elements. Raises RuntimeError for any other."""
    if tensor.numel():
        raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} has no memory")
    return 0


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, as torch computes them: an axis without elements counts as one."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


def named_strides(name: str, strides: Iterable[AnyStride], axes: str = "batch row head") -> dict[str, AnyStride]:
    """Strides as the fields of parameters: `name`_stride_batch and so on."""
    return {f"{name}_stride_{axis}": stride for axis, stride in zip(axes.split(), strides, strict=True)}


def token_strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, row, head, headdim) or varlen (row, head, headdim); zeros for None."""
    if tensor is None:
        return 0, 0, 0
    strides = tensor.stride()
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


def first_strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """Strides of the first three axes, (batch, row, head) of scales and gates; zeros for None."""
    if tensor is None:
        return 0, 0, 0
    first, second, third, *_ = tensor.stride()
    return first, second, third


def score_strides(tensor: Tensor | None) -> tuple[int, int, int, int]:
    """(batch, head, row, key) strides of a bias or block mask with these axes, or of a varlen bias (head, row, key).

    Zeros for None.
    """
    if tensor is None:
        return 0, 0, 0, 0
    *batch, head, row, key = tensor.stride()
    return (batch[0] if batch else 0), head, row, key
