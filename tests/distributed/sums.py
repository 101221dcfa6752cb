"""Calls of the public functions on every rank, and their exact results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from fastattention.attention.reference import reference_attention
from fastattention.distributed import (
    attention_out_proj,
    attention_out_proj_allreduce,
    attention_out_proj_allreduce_with_kvcache,
)
from fastattention.testing.calls import Call, build_call
from fastattention.testing.case import DenseCase, KvCacheCase
from fastattention.testing.devices import moved
from fastattention.testing.oracle import FACTOR, largest_error

HIDDEN = 40


@dataclass(frozen=True)
class Sum:
    """A case of attention, with different values on every rank, and the blocks of its rows."""

    case: DenseCase | KvCacheCase
    partition: tuple[int, ...] | str
    dtype: torch.dtype = torch.float32
    bias: bool = False
    hidden: int = HIDDEN

    @property
    def rows(self) -> int:
        return self.case.batch_size * self.case.seqlen_q

    def part(self, rank: int) -> tuple[Call, Tensor]:
        """This rank's attention and its columns of the projection."""
        call = build_call(replace(self.case, name=f"{self.case.name} on rank {rank}"), self.dtype)
        columns = self.case.nheads * self.case.headdim_of_v
        generator = torch.Generator().manual_seed(rank)
        w_o = torch.randn(self.hidden, columns, generator=generator) * columns**-0.5
        return call, w_o.to(self.dtype)

    def bias_tensor(self) -> Tensor | None:
        """The bias, the same on every rank."""
        return torch.linspace(-1.0, 1.0, self.hidden).to(self.dtype) if self.bias else None


def arguments_of(one: Sum, device: str = "cpu") -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """The function that makes the call on this rank, and its arguments."""
    call, w_o = one.part(dist.get_rank())
    bias = one.bias_tensor()
    arguments = dict(call.arguments if device == "cpu" else moved(call, device).arguments)
    arguments |= {"w_o": w_o.to(device), "bias": None if bias is None else bias.to(device), "partition": one.partition}
    if isinstance(one.case, DenseCase):
        return attention_out_proj_allreduce, arguments
    del arguments["rotary_interleaved"], arguments["num_splits"]
    return attention_out_proj_allreduce_with_kvcache, arguments


def run_part(one: Sum, device: str = "cpu", **changes: Any) -> Tensor:
    """The call on this rank; `changes` to its arguments. The result is on the CPU."""
    function, arguments = arguments_of(one, device)
    return function(**arguments | changes).cpu()


@torch.no_grad()
def run_repeated(one: Sum, device: str = "cpu", **changes: Any) -> list[Tensor]:
    """A call on which the ranks agree, and a repeated one with twice the values, which is known by its signature."""
    function, arguments = arguments_of(one, device)
    assert function is attention_out_proj_allreduce
    doubled = {name: value * 2.0 for name, value in arguments.items() if name in ("w_o", "bias") and value is not None}
    outs = [function(**arguments | changes)]
    with mock.patch.object(attention_out_proj, "prepare_dense", side_effect=AssertionError("checked again")):
        outs.append(function(**arguments | doubled | changes))
    return [out.cpu() for out in outs]


def check_repeated(one: Sum, outs: list[list[Tensor]]) -> None:
    """Checks `run_repeated` on all ranks: exactly twice the result, because all rounded values are twice as large."""
    check(one, [first for first, _ in outs])
    for first, second in outs:
        assert torch.equal(second, 2.0 * first)


def summed(one: Sum, size: int, compute_dtype: torch.dtype | None) -> Tensor:
    """The sum over `size` ranks as torch computes it, in one precision; None: the precision of the call."""
    total, dtype = torch.zeros(()), compute_dtype or one.dtype
    for rank in range(size):
        call, w_o = one.part(rank)
        attended = reference_attention(*call.prepare(), compute_dtype=compute_dtype).out
        total = total.to(dtype) + attended.flatten(2).to(dtype) @ w_o.to(dtype).t()
    bias = one.bias_tensor()
    return total if bias is None else total + bias.to(dtype)


def check(one: Sum, outs: list[Tensor]) -> None:
    """Checks that the results of all ranks are right and equal."""
    exact, usual = (summed(one, len(outs), dtype) for dtype in (torch.float64, None))
    tolerance = FACTOR * largest_error(usual, exact) + torch.finfo(one.dtype).eps * max(1.0, exact.abs().max().item())
    for out in outs:
        assert (out.dtype, out.shape) == (one.dtype, exact.shape)
        assert torch.equal(out, outs[0]), "ranks have different results"
    assert outs[0].isfinite().all()
    error = largest_error(outs[0], exact)
    assert error <= tolerance, f"off by {error:.3g}; allowed are {tolerance:.3g}"
