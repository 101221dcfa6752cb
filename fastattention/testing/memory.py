"""Memory layouts of tensors. All other memory is NaN, so that a kernel that reads it cannot hide it.

int8 has no NaN: there it is -128, and the NaN in its scale shows the read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.testing.case import Memory

GUARD = 256  # elements before and after a guarded tensor


class Placed(NamedTuple):
    """A tensor and the whole buffer it is a view of."""

    view: Tensor
    buffer: Tensor


def place(values: Tensor, memory: Memory) -> Placed:
    """`values` (..., tokens, heads, headdim) in a new buffer that is laid out as `memory` says.

    "one_head_expanded" stores the first head only and repeats it. "one_batch_expanded" is a contiguous tensor of one
    sequence, which the caller expands.
    """
    *batch, tokens, heads, headdim = values.shape
    if memory in ("contiguous", "one_batch_expanded"):
        return _fill((*batch, tokens, heads, headdim), values, lambda buffer: buffer)
    if memory == "heads_major":
        return _fill((*batch, heads, tokens, headdim), values, lambda buffer: buffer.transpose(-2, -3))
    if memory == "sliced_heads":  # as for q, k and v in one tensor of all their heads
        return _fill((*batch, tokens, heads + 3, headdim), values, lambda buffer: buffer[..., 1 : 1 + heads, :])
    if memory == "every_second_token":
        return _fill((*batch, 2 * tokens, heads, headdim), values, lambda buffer: buffer[..., 1::2, :, :])
    if memory == "sliced_headdim":  # no row begins at a multiple of any vector's width
        return _fill((*batch, tokens, heads, headdim + 3), values, lambda buffer: buffer[..., 1 : 1 + headdim])
    if memory == "every_second_element":
        return _fill((*batch, tokens, heads, 2 * headdim), values, lambda buffer: buffer[..., ::2])
    assert memory == "one_head_expanded"
    first = values[..., :1, :].clone()
    return Placed(first.expand_as(values), first)


def _fill(buffer_shape: tuple[int, ...], values: Tensor, view_of: Callable[[Tensor], Tensor]) -> Placed:
    buffer = values.new_full(buffer_shape, nothing(values.dtype))
    view = view_of(buffer)
    view.copy_(values)
    return Placed(view, buffer)


def guarded(tensor: Tensor, offset: int = 0) -> Tensor:
    """A copy with the same strides, in memory without other elements, `offset` elements away from alignment."""
    spanned = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    buffer = tensor.new_full((max(spanned, 0) + 2 * GUARD + offset,), nothing(tensor.dtype))
    return buffer.as_strided(tensor.shape, tensor.stride(), GUARD + offset).copy_(tensor)


@contextmanager
def nan_in_fresh_memory() -> Iterator[None]:
    """Torch fills what it allocates with NaN, as it does in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def nothing(dtype: torch.dtype) -> float:
    """The value of memory without an element."""
    return torch.nan if dtype.is_floating_point else -128


def whole_memory(tensor: Tensor) -> Tensor:
    """All elements of the memory that a tensor is a view of, on its device."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def bits(tensor: Tensor) -> Tensor:
    """The bits of a contiguous tensor as integers: equal also where both are NaN, unequal for 0.0 and -0.0."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
