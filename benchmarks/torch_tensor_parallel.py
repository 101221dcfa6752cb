"""torch's own implementations of a row-parallel projection and its sum, besides product and NCCL all-reduce.

Both use torch.distributed._symmetric_memory, whose operators need it:

- two-shot: the product is written to symmetric memory, where `two_shot_all_reduce_` sums it.
- async: async tensor parallelism. `fused_matmul_reduce_scatter` overlaps the product with the reduce-scatter; an
    all-gather then gives every rank the whole result, as an all-reduce does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Project = Callable[[Tensor], None]  # takes attended rows (rows, features)


def two_shot(w_o: Tensor, out: Tensor) -> Project:
    """Leaves the sum in symmetric memory. Raises RuntimeError where torch does not serve it. Collective."""
    symmetric, name = _symmetric_memory()
    sums = symmetric.empty(out.numel() // w_o.shape[0], w_o.shape[0], dtype=out.dtype, device=out.device)
    symmetric.rendezvous(sums, name)
    operator = torch.ops.symm_mem.two_shot_all_reduce_

    def project(attended: Tensor) -> None:
        torch.mm(attended, w_o.t(), out=sums)
        operator(sums, "sum", name)

    project(torch.zeros(sums.shape[0], w_o.shape[1], dtype=out.dtype, device=out.device))
    return project


def async_tensor_parallel(w_o: Tensor, out: Tensor) -> Project:
    """Writes the sum to `out`. Raises RuntimeError where torch does not serve it. Collective."""
    symmetric, name = _symmetric_memory()
    symmetric.enable_symm_mem_for_group(name)
    flat = out.view(-1, w_o.shape[0])
    if len(flat) % dist.get_world_size():
        raise RuntimeError(f"{len(flat)} rows are no multiple of the number of ranks")
    weight = w_o.t()
    operator = torch.ops.symm_mem.fused_matmul_reduce_scatter

    def project(attended: Tensor) -> None:
        dist.all_gather_into_tensor(flat, operator(attended, weight, "sum", 0, name))

    project(torch.zeros(len(flat), w_o.shape[1], dtype=out.dtype, device=out.device))
    return project


def _symmetric_memory() -> tuple[Any, str]:
    """The module, and the name of the default group."""
    from torch.distributed import _symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    return _symmetric_memory, group.group_name
