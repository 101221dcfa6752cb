"""Where tensors lie, as kernels want to know it: pointers and strides in elements."""

from __future__ import annotations

from torch import Tensor


def pointer(tensor: Tensor | None) -> int:
    """Address of the first element; 0 for a tensor that a call does not have."""
    return 0 if tensor is None else tensor.data_ptr()


def token_strides(tensor: Tensor | None) -> tuple[int, int, int]:
    """(batch, row, head) strides of (batch, row, head, headdim) or packed (row, head, headdim); zeros for None."""
    if tensor is None:
        return 0, 0, 0
    strides = tensor.stride()
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


def scale_strides(scale: Tensor | None) -> tuple[int, int, int]:
    """(batch, row, head) strides of the scales of a quantised cache; zeros for None."""
    return (0, 0, 0) if scale is None else (scale.stride(0), scale.stride(1), scale.stride(2))


def bias_strides(bias: Tensor | None) -> tuple[int, int, int, int]:
    """(batch, head, row, key) strides of (batch, head, row, key) or packed (head, row, key); zeros for None."""
    if bias is None:
        return 0, 0, 0, 0
    *batch, head, row, key = bias.stride()
    return (batch[0] if batch else 0), head, row, key
