"""Makes tensors readable by the kernels: the computed dtype, rows aligned to 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention import environment
from fastattention.attention.problem import Inputs
from fastattention.errors import ArgumentError

CHUNK = 8  # elements of 16 bits that are read at once: 16 bytes


def prepared(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs as the kernels read them: nothing is copied when they have `dtype` and rows at multiples of 16 bytes."""
    bias = inputs.attn_bias
    if bias is not None and bias.dtype not in (torch.float32, dtype):
        bias = bias.float()  # not in `dtype`: a large negative bfloat16 would become -inf in float16
    check_float16_range(dtype, "sdpa", q=inputs.q, k=inputs.k, v=inputs.v)
    if inputs.v_scale is None:  # no quantized cache
        q, k, v = (aligned_as(tensor, dtype) for tensor in (inputs.q, inputs.k, inputs.v))
    else:
        q, k, v = (_aligned(tensor, 2 * CHUNK) for tensor in (inputs.q.to(dtype), inputs.k, inputs.v))
    return inputs._replace(q=q, k=k, v=v, attn_bias=bias)


def check_float16_range(dtype: torch.dtype, remedy: str, **tensors: Tensor) -> None:
    """Raises ArgumentError for bfloat16 values that are infinite in `dtype`, if FASTATTENTION_CHECK_RANGE is set.

    remedy: the name of a backend that computes in bfloat16
    """
    if dtype is not torch.float16 or not environment.check_float16_range():
        return
    limit = torch.finfo(torch.float16).max
    for name, tensor in tensors.items():
        largest = float(tensor.abs().amax()) if tensor.numel() and tensor.dtype is torch.bfloat16 else 0.0
        if largest > limit:
            raise ArgumentError(
                f"{name} holds {largest:.4g}, and this GPU computes bfloat16 in float16, which ends at {limit:.0f}; "
                f"scale it down or use backend={remedy!r}"
            )


def is_aligned(tensor: Tensor, columns: int = CHUNK) -> bool:
    """Whether rows are contiguous, 16-byte aligned, a multiple of `columns` wide and less than 2^31 elements apart."""
    *outer, row, head, column = tensor.stride()
    in_chunks = all(size * tensor.itemsize % 16 == 0 for size in (*outer, row, head))
    return in_chunks and tensor.shape[-1] % columns == 0 and tensor.data_ptr() % 16 == 0 and column == 1 and row < 2**31


def aligned_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor, or a copy of it in `dtype` whose rows are aligned to 16 bytes and end in zeros."""
    return _aligned(tensor.to(dtype), CHUNK)


def _aligned(tensor: Tensor, columns: int) -> Tensor:
    """The tensor, or an aligned copy whose added columns are zeros."""
    if is_aligned(tensor, columns):
        return tensor
    if missing := -tensor.shape[-1] % columns:
        # It is padded as bytes, because torch pads no float8.
        padded = torch.nn.functional.pad(tensor.view(torch.int8) if tensor.itemsize == 1 else tensor, (0, missing))
        return padded.view(tensor.dtype)
    return tensor.clone(memory_format=torch.contiguous_format)
