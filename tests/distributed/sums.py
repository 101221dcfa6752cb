"""Calls of the public functions on every rank, and what they must return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from conformance.calls import Call, build_call
from conformance.case import Case, DenseCase, KvCacheCase
from conformance.devices import moved
from conformance.oracle import FACTOR, largest_error
from torch import Tensor

from fastattention.distributed import (
    attention_linear,
    attention_linear_allreduce,
    attention_linear_allreduce_with_kvcache,
)
from fastattention.reference import reference_attention

HIDDEN = 40


@dataclass(frozen=True)
class Sum:
    """A case of attention that every rank has with numbers of its own, and the blocks of its rows."""

    case: DenseCase | KvCacheCase
    plan: tuple[int, ...] | str
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
        """The same on every rank."""
        return torch.linspace(-1.0, 1.0, self.hidden).to(self.dtype) if self.bias else None


def arguments_of(one: Sum, device: str = "cpu") -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """The function that makes the call on this rank, and its arguments."""
    call, w_o = one.part(dist.get_rank())
    bias = one.bias_tensor()
    arguments = dict(call.arguments if device == "cpu" else moved(call, device).arguments)
    arguments |= {"w_o": w_o.to(device), "bias": None if bias is None else bias.to(device), "plan": one.plan}
    if isinstance(one.case, DenseCase):
        return attention_linear_allreduce, arguments
    del arguments["rotary_interleaved"], arguments["num_splits"]
    return attention_linear_allreduce_with_kvcache, arguments


def run_part(one: Sum, groups: str = "world", device: str = "cpu", **changes: Any) -> Tensor:
    """The call on this rank; `changes` to its arguments. The result is on the CPU."""
    function, arguments = arguments_of(one, device)
    return function(**arguments | {"group": group_named(groups)} | changes).cpu()


@torch.no_grad()
def run_repeated(one: Sum, device: str = "cpu", **changes: Any) -> list[Tensor]:
    """The call of a plan that is agreed on, and one like it with twice the numbers, which is known by its looks."""
    function, arguments = arguments_of(one, device)
    assert function is attention_linear_allreduce
    doubled = {name: value * 2.0 for name, value in arguments.items() if name in ("w_o", "bias") and value is not None}
    outs = [function(**arguments | changes)]
    with mock.patch.object(attention_linear, "prepare_dense", side_effect=AssertionError("checked again")):
        outs.append(function(**arguments | doubled | changes))
    return [out.cpu() for out in outs]


def check_repeated(one: Sum, outs: list[list[Tensor]]) -> None:
    """What all ranks have of `run_repeated`: twice the result, to the bit, as all that is rounded is twice as large."""
    check(one, [first for first, _ in outs])
    for first, second in outs:
        assert torch.equal(second, 2.0 * first)


@functools.cache
def group_named(name: str) -> dist.ProcessGroup | None:
    """The group of this rank that a test calls by this name: all ranks, or pairs of them."""
    if name == "world":
        return None
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return pairs[dist.get_rank() // 2]


def expected(one: Sum, size: int) -> tuple[Tensor, float]:
    """The exact sum over `size` ranks in float64, and by how much a result may be off."""
    exact = _summed(one, size, torch.float64)
    usual = _summed(one, size, None)
    rounding = torch.finfo(one.dtype).eps * max(1.0, exact.abs().max().item())
    return exact, FACTOR * largest_error(usual, exact) + rounding


def _summed(one: Sum, size: int, compute_dtype: torch.dtype | None) -> Tensor:
    """The sum as torch computes it, in one precision."""
    total: Tensor | None = None
    dtype = compute_dtype or one.dtype
    for rank in range(size):
        call, w_o = one.part(rank)
        attended = reference_attention(*call.prepare(), compute_dtype=compute_dtype).out
        share = attended.flatten(2).to(dtype) @ w_o.to(dtype).t()
        total = share if total is None else total + share
    assert total is not None
    bias = one.bias_tensor()
    return total if bias is None else total + bias.to(dtype)


def check(one: Sum, outs: list[Tensor]) -> None:
    """The results of all ranks are right, and one and the same."""
    exact, tolerance = expected(one, len(outs))
    for out in outs:
        assert (out.dtype, out.shape) == (one.dtype, exact.shape)
        assert torch.equal(out, outs[0]), "ranks have different results"
    assert outs[0].isfinite().all()
    error = largest_error(outs[0], exact)
    assert error <= tolerance, f"off by {error:.3g}; allowed are {tolerance:.3g}"


def named(case: Case) -> str:
    return case.name
