"""Every wrong argument of fast_attn_varlen_func that fast_attn_func does not have, and of the packed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import ones, zeros
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from fastattention import (
    fast_attn_kvpacked_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_varlen_kvpacked_func,
    fast_attn_varlen_qkvpacked_func,
)
from unit.refusals import Refusal, assert_refused, refusals, refused
from unit.samples import int32

FLEX_MASK = create_block_mask(noop_mask, None, None, 5, 5, device="cpu")


def arguments() -> dict[str, Any]:
    """A call that is accepted: sequences of 2 and 3 queries and of 4 and 3 keys."""
    tensors = {"q": zeros(5, 4, 16), "k": zeros(7, 2, 16), "v": zeros(7, 2, 24)}
    return tensors | {"cu_seqlens_q": int32(0, 2, 5), "cu_seqlens_k": int32(0, 4, 7), "backend": "sdpa"}


def paged_arguments() -> dict[str, Any]:
    """The same call with keys in pages of 2 tokens, of which there are 4."""
    pages = {"k": zeros(4, 2, 2, 16), "v": zeros(4, 2, 2, 24), "block_table": int32([0, 1], [3, 2])}
    return arguments() | pages


@pytest.mark.parametrize("given", [arguments(), paged_arguments()], ids=["varlen", "paged"])
def test_the_call_without_changes_is_accepted(given: dict[str, Any]) -> None:
    assert fast_attn_varlen_func(**given).shape == (5, 4, 24)


@refusals(
    refused("q must be (total_q, nheads, headdim)", "(1, 5, 4, 16)", q=zeros(1, 5, 4, 16)),
    refused("k must be (total_k, nheads_k, headdim)", "(1, 7, 2, 16)", k=zeros(1, 7, 2, 16)),
    refused("v must be (total_k, nheads_k, headdim_v)", "(7, 2)", v=zeros(7, 2)),
    refused("k and v must hold the same tokens", "(7, 2, 16)", "(6, 2, 24)", v=zeros(6, 2, 24)),
    refused("k has headdim 8", "q has 16", k=zeros(7, 2, 8)),
    refused("nheads=3", "multiple of nheads_k=2", q=zeros(5, 3, 16)),
    refused("cu_seqlens_q must be a torch.Tensor", "list", cu_seqlens_q=[0, 2, 5]),
    refused("cu_seqlens_k must be a torch.Tensor", "NoneType", cu_seqlens_k=None),
    refused("cu_seqlens_q must be int32", "int64", cu_seqlens_q=int32(0, 2, 5).long()),
    refused("cu_seqlens_k must be int32", "float32", cu_seqlens_k=int32(0, 4, 7).float()),
    refused("cu_seqlens_q is on meta", "same device", cu_seqlens_q=int32(0, 2, 5).to("meta")),
    refused("cu_seqlens_q must be (batch_size + 1)", "(1, 3)", cu_seqlens_q=int32([0, 2, 5])),
    refused("cu_seqlens_q must be (batch_size + 1,)", "no elements", cu_seqlens_q=int32()),
    refused("cu_seqlens_k must be (batch_size + 1) = (3)", "(2,)", cu_seqlens_k=int32(0, 7)),
    refused("cu_seqlens_q must start at 0", "got 1", cu_seqlens_q=int32(1, 2, 5)),
    refused("cu_seqlens_k must start at 0", "got -1", cu_seqlens_k=int32(-1, 4, 7)),
    refused("cu_seqlens_q must not decrease", "6 then 5 at index 2", cu_seqlens_q=int32(0, 6, 5)),
    refused("cu_seqlens_k must not decrease", "8 then 7 at index 2", cu_seqlens_k=int32(0, 8, 7)),
    refused("cu_seqlens_q must end at", "tokens, 5", "got 4", cu_seqlens_q=int32(0, 2, 4)),
    refused("cu_seqlens_k must end at", "tokens, 7", "got 9", cu_seqlens_k=int32(0, 4, 9)),
    refused("max_seqlen_q=2", "longest sequence, 3", "None derives it", max_seqlen_q=2),
    refused("max_seqlen_k=3", "longest sequence, 4", "None derives it", max_seqlen_k=3),
    refused("max_seqlen_q=-1", "longest sequence, 3", max_seqlen_q=-1),
    refused("max_seqlen_q must be an integer", "3.0", max_seqlen_q=3.0),
    refused("max_seqlen_k must be an integer", "'4'", max_seqlen_k="4"),
    refused("attn_bias must broadcast to (nheads, total_q, max_seqlen_k) = (4, 5, 4)", "(5, 7)", attn_bias=zeros(5, 7)),
    refused("attn_bias", "(4, 5, 4)", "(1, 4, 5, 4)", attn_bias=zeros(1, 4, 5, 4)),
    refused("alibi_slopes must be", "(2, 4)", "(3, 4)", alibi_slopes=zeros(3, 4)),
    refused("sinks must be (nheads) = (4,)", "(5,)", sinks=zeros(5)),
    refused(
        "(2 or 1, 4 or 1, 1, 1) with block_size=(64, 64)",
        "(2, 4, 1, 2)",
        block_mask=ones(2, 4, 1, 2) > 0,
        block_size=64,
    ),
    refused("block_mask is a BlockMask", "varlen call a bool tensor", block_mask=FLEX_MASK),
    refused("softmax_scale=nan", "finite", softmax_scale=float("nan")),
    refused("dropout_p=2.0", "below 1", dropout_p=2.0),
    refused("window_size=(-3, 0)", "-1 (unlimited)", window_size=(-3, 0)),
)
def test_wrong_argument_is_refused(refusal: Refusal) -> None:
    fast_attn_varlen_func(**arguments())
    assert_refused(lambda: fast_attn_varlen_func(**(arguments() | refusal.changes)), refusal)


@refusals(
    refused("k must be (num_blocks, page_block_size", "(7, 2, 16)", k=zeros(7, 2, 16)),
    refused("v must be", "headdim_v)", "(7, 2, 24)", v=zeros(7, 2, 24)),
    refused("k and v must hold the same tokens", "(3, 2, 2, 24)", v=zeros(3, 2, 2, 24)),
    refused("k must be (num_blocks", "at least one token", "(4, 0, 2, 16)", k=zeros(4, 0, 2, 16), v=zeros(4, 0, 2, 24)),
    refused("block_table must be a torch.Tensor", "list", block_table=[[0, 1]]),
    refused("block_table must be int32", "int64", block_table=int32([0, 1], [3, 2]).long()),
    refused("block_table must be", "(2, any)", "(1, 2)", block_table=int32([0, 1])),
    refused("block_table must be (batch_size, max_blocks", "(2,)", block_table=int32(0, 1)),
    refused("cu_seqlens_k gives sequence 0 4 tokens", "block_table holds 2 at most", block_table=int32([0], [3])),
    refused("block_table names page 4", "sequence 1", "0 to 3", block_table=int32([0, 1], [4, 2])),
    refused("block_table names page -1", "sequence 0", "0 to 3", block_table=int32([0, -1], [3, 2])),
)
def test_wrong_page_is_refused(refusal: Refusal) -> None:
    fast_attn_varlen_func(**paged_arguments())
    assert_refused(lambda: fast_attn_varlen_func(**(paged_arguments() | refusal.changes)), refusal)


def test_unused_entries_of_a_block_table_may_hold_anything() -> None:
    table = int32([0, 1, -7], [3, 2, 99])
    assert fast_attn_varlen_func(**(paged_arguments() | {"block_table": table})).shape == (5, 4, 24)


def test_lengths_longer_than_needed_change_nothing() -> None:
    torch.manual_seed(0)
    given = {name: torch.randn_like(x) if name in "qkv" else x for name, x in arguments().items()}
    out = fast_attn_varlen_func(**given, causal=True)
    assert torch.equal(fast_attn_varlen_func(**given, max_seqlen_q=9, max_seqlen_k=9, causal=True), out)
    tensors = {"max_seqlen_q": torch.tensor(3), "max_seqlen_k": torch.tensor(4)}
    assert torch.equal(fast_attn_varlen_func(**given, **tensors, causal=True), out)


PACKED: dict[str, tuple[Callable[[Any], object], str]] = {
    "qkv": (fast_attn_qkvpacked_func, "qkv must be (batch_size, seqlen, 3, nheads"),
    "kv": (lambda x: fast_attn_kvpacked_func(x, x), "kv must be (batch_size, seqlen, 2, nheads, headdim)"),
    "varlen_qkv": (
        lambda x: fast_attn_varlen_qkvpacked_func(x, int32(0, 2)),
        "qkv must be (total, 3, nheads, headdim)",
    ),
    "varlen_kv": (
        lambda x: fast_attn_varlen_kvpacked_func(x, x, int32(0, 2), int32(0, 2)),
        "kv must be (total, 2, nheads, headdim)",
    ),
}


@pytest.mark.parametrize(("call", "says"), PACKED.values(), ids=PACKED)
def test_wrong_packing_is_refused(call: Callable[[Any], object], says: str) -> None:
    assert_refused(lambda: call(zeros(2, 5, 4, 16)), refused(says, "(2, 5, 4, 16)"))


def test_packed_argument_must_be_a_tensor() -> None:
    assert_refused(lambda: fast_attn_qkvpacked_func([1.0]), refused("qkv must be a torch.Tensor", "list"))  # type: ignore[arg-type]
