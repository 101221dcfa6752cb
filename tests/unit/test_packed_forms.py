"""qkv and kv in one tensor: the same call, bit for bit, on views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import (
    fast_attn_func,
    fast_attn_kvpacked_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_varlen_kvpacked_func,
    fast_attn_varlen_qkvpacked_func,
)
from unit.fakes import Willing

CU_Q = torch.tensor([0, 2, 6], dtype=torch.int32)
CU_K = torch.tensor([0, 3, 7], dtype=torch.int32)

# Every argument of the packed forms, each with an effect on the result.
POSITIONAL = (0.25, 0.3, True, (2, -1), 5.0, torch.tensor([0.1, 0.2, 0.3, 0.4]), True, True)
KEYWORDS: dict[str, Any] = {"sinks": torch.tensor([0.1, -1.0, 2.0, 0.0]), "backend": "sdpa"}


def pair(form: str) -> tuple[Callable[..., Any], tuple[Tensor, ...], Callable[..., Any], tuple[Tensor, ...]]:
    """(packed form, its tensors, plain function, its tensors)."""
    if form == "qkvpacked":
        qkv = torch.randn(2, 5, 3, 4, 8)
        return fast_attn_qkvpacked_func, (qkv,), fast_attn_func, qkv.unbind(2)
    if form == "kvpacked":
        q, kv = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 2, 8)
        return fast_attn_kvpacked_func, (q, kv), fast_attn_func, (q, *kv.unbind(2))
    if form == "varlen_qkvpacked":
        qkv = torch.randn(6, 3, 4, 8)
        return fast_attn_varlen_qkvpacked_func, (qkv, CU_Q), fast_attn_varlen_func, (*qkv.unbind(1), CU_Q, CU_Q)
    q, kv = torch.randn(6, 4, 8), torch.randn(7, 2, 2, 8)
    return fast_attn_varlen_kvpacked_func, (q, kv, CU_Q, CU_K), fast_attn_varlen_func, (q, *kv.unbind(1), CU_Q, CU_K)


FORMS = pytest.mark.parametrize("form", ["qkvpacked", "kvpacked", "varlen_qkvpacked", "varlen_kvpacked"])


@FORMS
def test_every_argument_arrives(form: str) -> None:
    packed, packed_tensors, plain, plain_tensors = pair(form)
    lengths = {"varlen_qkvpacked": (5,), "varlen_kvpacked": (4, 6)}.get(form, ())
    plain_lengths = lengths * 2 if len(lengths) == 1 else lengths
    torch.manual_seed(1)
    out, lse, mask = packed(*packed_tensors, *lengths, *POSITIONAL, **KEYWORDS)
    torch.manual_seed(1)
    expected_out, expected_lse, expected_mask = plain(*plain_tensors, *plain_lengths, *POSITIONAL, **KEYWORDS)
    assert torch.equal(out, expected_out)
    assert torch.equal(lse, expected_lse)
    assert torch.equal(mask, expected_mask)


@FORMS
def test_defaults_are_the_same(form: str) -> None:
    packed, packed_tensors, plain, plain_tensors = pair(form)
    assert torch.equal(packed(*packed_tensors, backend="sdpa"), plain(*plain_tensors, backend="sdpa"))


@FORMS
def test_nothing_is_copied(form: str, only_backends: Callable[..., None]) -> None:
    only_backends(Willing)
    packed, packed_tensors, *_ = pair(form)
    Willing.served.clear()
    packed(*packed_tensors)
    _, inputs = Willing.served.pop()
    memory = packed_tensors[0 if form.endswith("qkvpacked") else 1].untyped_storage().data_ptr()
    assert inputs.k.untyped_storage().data_ptr() == memory
    assert inputs.v.untyped_storage().data_ptr() == memory


@FORMS
def test_an_unknown_keyword_is_refused(form: str) -> None:
    packed, packed_tensors, *_ = pair(form)
    with pytest.raises(TypeError, match="dropout_rate"):
        packed(*packed_tensors, dropout_rate=0.1)


def test_gradients_arrive_in_the_packed_tensor() -> None:
    qkv = torch.randn(2, 5, 3, 4, 8, requires_grad=True)
    weights = torch.randn(2, 5, 4, 8)
    (fast_attn_qkvpacked_func(qkv, causal=True) * weights).sum().backward()
    leaves = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    (fast_attn_func(*leaves, causal=True) * weights).sum().backward()
    assert torch.equal(qkv.grad, torch.stack([x.grad for x in leaves if x.grad is not None], dim=2))
