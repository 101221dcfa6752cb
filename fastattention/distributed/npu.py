"""Ascend's own overlap: the product of a projection and its all-reduce as one operator, npu_mm_all_reduce_base.

Not run: there was no NPU. What is handed to the operator is tested against torch_npu's real schema, on a CPU.

The operator cuts the product into pieces and sums each while it computes the next. Attention stays outside, so sums are
hidden under the product alone. Transport "c10d" has row blocks over HCCL, which hide them under attention too.
torch_npu's documentation says not to use it for decoding, and to use it and similar operators in one group only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from fastattention.backends.ascend import vendor

NAME = "npu_mm_all_reduce_base"


def why_not(num_rows: int, weight: Tensor, group: dist.ProcessGroup) -> str | None:
    """Why the operator cannot serve `num_rows` rows and a rank's weight (hidden, features), or None."""
    if weight.device.type != "npu":
        return f"tensors are on {weight.device.type}; {NAME} is an operator of Ascend NPUs"
    hidden, features = weight.shape
    return vendor.why_not_linear_all_reduce(num_rows, features, hidden, weight.dtype, dist.get_world_size(group))


def linear_allreduce(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of x @ weight.T, plus bias.

    x: (..., features), what this rank holds; weight: (hidden, features), its columns; bias: (hidden,), added once
    Returns (..., hidden), the same on every rank. `why_not` must have no reason against the call.
    """
    out = vendor.linear_all_reduce(x.flatten(0, -2).contiguous(), weight.contiguous(), communicator_name(group))
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], -1)


def communicator_name(group: dist.ProcessGroup) -> str:
    """HCCL's name of the group, for operators that communicate by themselves. Makes the communicator if need be."""
    backend = group._get_backend(torch.device("npu"))
    name: str = backend.get_hccl_comm_name(dist.get_rank())  # type: ignore[attr-defined]  # by the rank in the world
    return name
