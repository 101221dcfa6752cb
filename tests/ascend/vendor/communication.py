"""npu_mm_all_reduce_base for tensors on a CPU, as torch_npu documents it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ascend.vendor.reference import require, require_none

_registered: list[torch.library.Library] = []
_groups: dict[str, Any] = {}  # objects that add up: all_reduce(partial) -> Tensor


def register() -> None:
    """Registers the operator under the schema of the imported torch_npu."""
    library = torch.library.Library("npu", "IMPL", "CPU")
    library.impl("npu_mm_all_reduce_base", npu_mm_all_reduce_base)
    _registered.append(library)  # it unregisters when it is collected


class _Group:
    """A group whose ranks are threads: adds up their tensors once all have given one."""

    def __init__(self, num_ranks: int) -> None:
        self._met = threading.Barrier(num_ranks, timeout=30.0)
        self._brought: list[Tensor] = []

    def all_reduce(self, partial: Tensor) -> Tensor:
        self._brought.append(partial)
        self._met.wait()
        total = torch.stack(self._brought).sum(dim=0)
        if self._met.wait() == 0:
            self._brought = []
        self._met.wait()
        return total


def name_group(name: str, group: Any) -> None:
    """Lets `name` be the communicator of `group`, which has all_reduce(partial) -> Tensor."""
    _groups[name] = group


def on_ranks(num_ranks: int, work: Callable[[int, str], Any]) -> list[Any]:
    """The results of work(rank, communicator) on every rank of a new group."""
    name = f"group of {num_ranks}"
    name_group(name, _Group(num_ranks))
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(lambda rank: work(rank, name), range(num_ranks)))


def npu_mm_all_reduce_base(
    x1: Tensor,
    x2: Tensor,
    hcom: str,
    *,
    reduce_op: str = "sum",
    bias: Tensor | None = None,
    comm_turn: int = 0,
    **rest: Any,
) -> Tensor:
    require_none(**{name: value for name, value in rest.items() if value != 0})
    require(reduce_op == "sum" and comm_turn == 0, f"reduce_op {reduce_op}, comm_turn {comm_turn}")
    require(x1.dim() in (2, 3) and x2.dim() == 2 and x1.shape[-1] == x2.shape[0], f"{x1.shape} and {x2.shape}")
    require(x1.dtype == x2.dtype and x1.dtype in (torch.float16, torch.bfloat16), f"{x1.dtype} and {x2.dtype}")
    require(x1.is_contiguous(), "a transposed x1")
    require(x2.is_contiguous() or x2.t().is_contiguous(), "x2 that is neither contiguous nor transposed")
    require(x1.numel() > 0 and x2.numel() > 0, "empty tensors")
    require(hcom in _groups, f"no communicator {hcom}")
    partial = x1.double() @ x2.double()
    if bias is not None:
        partial = partial + bias.double()  # on every rank: allreduce(x1 @ x2 + bias)
    return _groups[hcom].all_reduce(partial).to(x1.dtype)
