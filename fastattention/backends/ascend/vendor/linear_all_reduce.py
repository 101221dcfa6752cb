"""npu_mm_all_reduce_base: a row-parallel linear layer and its all-reduce as one operator.

    out = sum over ranks of x @ weight.T

The operator cuts the product itself and communicates each piece while it computes the next, so a layer that ends in it
needs no row blocks. Its bias is not used: out = all_reduce(x1 @ x2 + bias) [M] adds it once for each rank. [M]
recommends a product and an all-reduce instead for decoding, and with more than one communicator.

Source, torch_npu's documentation as of version 2.13:
    [M]  npu_mm_all_reduce_base
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.errors import ArgumentError

OPERATOR = "npu_mm_all_reduce_base"

_RANKS = (1, 2, 4, 8)  # [M]: on the Atlas A2, all linked by HCCS
_DTYPES = (torch.float16, torch.bfloat16)  # [M]: when not quantized
_MAX_SIZE = 2**31 - 1  # [M]: limit of m, k and n
_DEFAULT_TURN = 0  # comm_turn; [M] takes no other


def why_not_linear_all_reduce(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype, num_ranks: int
) -> str | None:
    """Why the operator cannot serve x (rows, in_features) and weight (out_features, in_features) of a rank, or None."""
    if not hasattr(torch.ops.npu, OPERATOR):
        return f"no {OPERATOR} is registered; import torch_npu, or install a version that has it"
    if dtype not in _DTYPES:
        return f"dtype {dtype}; {OPERATOR} takes {' and '.join(map(str, _DTYPES))}"
    if num_ranks not in _RANKS:
        return f"{num_ranks} ranks; {OPERATOR} takes {', '.join(map(str, _RANKS))}"
    for name, size in (("rows", rows), ("in_features", in_features), ("out_features", out_features)):
        if not 1 <= size <= _MAX_SIZE:
            return f"{name}={size}; {OPERATOR} takes 1 to {_MAX_SIZE}"
    return None


def linear_all_reduce(x: Tensor, weight: Tensor, communicator: str) -> Tensor:
    """The sum over ranks of x @ weight.T, the same on every rank.

    x: (rows, in_features), contiguous: the inputs that this rank holds
    weight: (out_features, in_features), contiguous, in the dtype of x: this rank's columns of the layer's weight
    communicator: HCCL's name of the group, which its backend's get_hccl_comm_name(rank) gives
    Returns (rows, out_features) in the dtype of x. Raises ArgumentError for other tensors, some of which the operator,
    or its shape inference, would misread.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ArgumentError(
            "x must be (rows, in_features) and weight (out_features, in_features), got shapes "
            f"{tuple(x.shape)} and {tuple(weight.shape)}"
        )
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != x.dtype or tensor.dtype not in _DTYPES:
            raise ArgumentError(f"{name} must be float16 or bfloat16, in the dtype of x, got {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ArgumentError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if not tensor.numel():
            raise ArgumentError(f"{name} must not be empty, got shape {tuple(tensor.shape)}")
    out: Tensor = getattr(torch.ops.npu, OPERATOR)(
        x, weight.t(), communicator, reduce_op="sum", comm_turn=_DEFAULT_TURN
    )
    return out
