"""merge_attn_states: parts of the keys give the same results as all keys."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastattention import ArgumentError, fast_attn_func, fast_attn_varlen_func, merge_attn_states
from unit.refusals import Refusal, assert_refused, refusals, refused


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = fast_attn_func(q, k, v, return_lse=True, backend="sdpa")
    return out, lse


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return merge_attn_states([out for out, _ in parts], [lse for _, lse in parts])


def rows_without_keys(*shape: int) -> tuple[Tensor, Tensor]:
    """(out, lse) of rows without keys: out (batch_size, seqlen_q, nheads, headdim_v)."""
    batch_size, seqlen_q, nheads, _ = shape
    return torch.zeros(shape), torch.full((batch_size, nheads, seqlen_q), -torch.inf)


@pytest.mark.parametrize("cuts", [[], [4], [1, 2, 9], [0, 3, 3, 11]], ids=["whole", "two", "four", "with_empty_parts"])
def test_parts_of_the_keys_give_what_all_keys_give(cuts: list[int]) -> None:
    q, k, v = torch.randn(2, 3, 4, 8), 3 * torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 16)
    bounds = [0, *cuts, 11]
    out, lse = merged([attend(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(bounds)])
    whole_out, whole_lse = attend(q, k, v)
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse)


def test_varlen_parts_merge_too() -> None:
    q, k, v = torch.randn(5, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    cu_seqlens_q = torch.tensor([0, 2, 5], dtype=torch.int32)

    def part(begin: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = (x[:, begin:end].flatten(0, 1) for x in (k, v))
        cu_seqlens_k = torch.arange(3, dtype=torch.int32) * (end - begin)
        out, lse = fast_attn_varlen_func(q, keys, values, cu_seqlens_q, cu_seqlens_k, return_lse=True, backend="sdpa")
        return out, lse

    out, lse = merged([part(0, 2), part(2, 6)])
    whole_out, whole_lse = part(0, 6)
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse)


def test_stacked_tensors_are_parts() -> None:
    outs, lses = torch.randn(3, 2, 5, 4, 8), torch.randn(3, 2, 4, 5)
    torch.testing.assert_close(merge_attn_states(outs, lses), merge_attn_states(list(outs), list(lses)))


def test_a_part_without_keys_takes_no_part_whatever_it_holds() -> None:
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 11, 2, 8), torch.randn(2, 11, 2, 16)
    whole = attend(q, k, v)
    empty_out, empty_lse = rows_without_keys(2, 3, 4, 16)
    out, lse = merged([(empty_out.fill_(torch.nan), empty_lse), whole])
    assert torch.equal(out, whole[0])
    torch.testing.assert_close(lse, whole[1])


def test_rows_without_keys_in_all_parts_stay_zero() -> None:
    out, lse = merged([rows_without_keys(1, 2, 3, 8), rows_without_keys(1, 2, 3, 8)])
    assert torch.equal(out, torch.zeros(1, 2, 3, 8))
    assert torch.equal(lse, torch.full((1, 3, 2), -torch.inf))


def test_large_lses_do_not_overflow() -> None:
    outs, lses = torch.randn(2, 1, 2, 3, 8), torch.full((2, 1, 3, 2), 500.0)
    out, lse = merge_attn_states(outs, lses)
    torch.testing.assert_close(out, outs.mean(0))
    torch.testing.assert_close(lse, torch.full((1, 3, 2), 500.0 + math.log(2.0)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_computes_in_float32_and_rounds_once(dtype: torch.dtype) -> None:
    outs, lses = torch.randn(4, 1, 2, 3, 8).to(dtype), torch.randn(4, 1, 3, 2)
    out, _ = merge_attn_states(outs, lses)
    exact, _ = merge_attn_states(outs.float(), lses)
    assert torch.equal(out, exact.to(dtype))


def test_gradients_are_those_of_all_keys() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8, requires_grad=True) for _ in range(3))

    def gradients(call: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        out, lse = call()
        return torch.autograd.grad((out.sin().sum() + lse.sin().sum()), (q, k, v))

    whole = gradients(lambda: attend(q, k, v))
    parts = gradients(lambda: merged([attend(q, k[:, :2], v[:, :2]), attend(q, k[:, 2:], v[:, 2:])]))
    torch.testing.assert_close(parts, whole)


def test_gradients_of_rows_without_keys_are_zero() -> None:
    out, lse = rows_without_keys(1, 2, 3, 8)
    whole_out, whole_lse = attend(torch.randn(1, 2, 3, 8), torch.randn(1, 4, 3, 8), torch.randn(1, 4, 3, 8))
    leaves = [x.detach().requires_grad_() for x in (out, lse, whole_out, whole_lse)]
    leaves[3].data[0, 0, 1] = -torch.inf
    merged_out, merged_lse = merge_attn_states([leaves[0], leaves[2]], [leaves[1], leaves[3]])
    loss = merged_out.sum() + merged_lse[merged_lse.isfinite()].sum()
    grad_out, grad_lse, grad_whole_out, grad_whole_lse = torch.autograd.grad(loss, leaves)
    assert not grad_out.any()
    assert not grad_lse.any()
    assert grad_whole_out.isfinite().all()
    assert grad_whole_lse[0, 0, 1] == 0.0
    assert grad_whole_lse.isfinite().all()


OUT, LSE = torch.zeros(2, 5, 4, 8), torch.zeros(2, 4, 5)


@refusals(
    refused("outs and lses", "at least 1", "0 and 0", outs=[], lses=[]),
    refused("outs and lses must be of one length", "2 and 1", outs=[OUT, OUT]),
    refused("outs must be a sequence of tensors", "None", outs=None),
    refused("lses must be a sequence of tensors, or one with an axis", lses=torch.tensor(1.0)),
    refused("outs[0] must be floating point", "int32", outs=[OUT.int()]),
    refused("outs[0] must be a torch.Tensor", "list", outs=[[1.0]]),
    refused("lses[0] must be a torch.Tensor", "NoneType", lses=[None]),
    refused("outs[0] must be (batch_size, seqlen_q, nheads", "(4, 8)", outs=[OUT[0, 0]]),
    refused("outs[1] is (1, 5, 4, 8)", "(2, 5, 4, 8)", outs=[OUT, OUT[:1]], lses=[LSE, LSE]),
    refused("outs[1] is", "float16", "float32", outs=[OUT, OUT.half()], lses=[LSE, LSE]),
    refused("outs[1] is", "meta", "cpu", outs=[OUT, OUT.to("meta")], lses=[LSE, LSE]),
    refused("lses[0] must be (2, 4, 5) float32", "(2, 5, 4)", lses=[LSE.transpose(1, 2)]),
    refused("lses[0] must be (2, 4, 5) float32", "float16", lses=[LSE.half()]),
    refused("lses[0] must be", "on cpu", "on meta", lses=[LSE.to("meta")]),
)
def test_wrong_parts_are_refused(refusal: Refusal) -> None:
    arguments = {"outs": [OUT], "lses": [LSE]} | refusal.changes
    assert_refused(lambda: merge_attn_states(**arguments), refusal)


def test_a_varlen_lse_does_not_fit_a_dense_out() -> None:
    with pytest.raises(ArgumentError, match=r"lses\[0\] must be \(2, 4, 5\)"):
        merge_attn_states([OUT], [torch.zeros(4, 10)])
