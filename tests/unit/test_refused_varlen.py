"""Every wrong argument of fast_attn_varlen_func that fast_attn_func does not have, and of the packed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, noop_mask

from fastattention import (
    fast_attn_kvpacked_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_varlen_kvpacked_func,
    fast_attn_varlen_qkvpacked_func,
)
from unit.refusals import Refusal, assert_refused, refusals


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments() -> dict[str, Any]:
    """A call that is accepted: sequences of 2 and 3 queries and of 4 and 3 keys."""
    return {
        "q": torch.zeros(5, 4, 16),
        "k": torch.zeros(7, 2, 16),
        "v": torch.zeros(7, 2, 24),
        "cu_seqlens_q": int32(0, 2, 5),
        "cu_seqlens_k": int32(0, 4, 7),
        "backend": "sdpa",
    }


def paged_arguments() -> dict[str, Any]:
    """The same call with keys in pages of 2 tokens, of which there are 4."""
    changes = {
        "k": torch.zeros(4, 2, 2, 16),
        "v": torch.zeros(4, 2, 2, 24),
        "block_table": int32([0, 1], [3, 2]),
    }
    return arguments() | changes


@pytest.mark.parametrize("given", [arguments(), paged_arguments()], ids=["varlen", "paged"])
def test_the_call_without_changes_is_accepted(given: dict[str, Any]) -> None:
    assert fast_attn_varlen_func(**given).shape == (5, 4, 24)


@refusals(
    Refusal("q_rank", {"q": torch.zeros(1, 5, 4, 16)}, ("q must be (total_q, nheads, headdim)", "(1, 5, 4, 16)")),
    Refusal("k_rank", {"k": torch.zeros(1, 7, 2, 16)}, ("k must be (total_k, nheads_k, headdim)", "(1, 7, 2, 16)")),
    Refusal("v_rank", {"v": torch.zeros(7, 2)}, ("v must be (total_k, nheads_k, headdim_v)", "(7, 2)")),
    Refusal(
        "v_length", {"v": torch.zeros(6, 2, 24)}, ("k and v must hold the same tokens", "(7, 2, 16)", "(6, 2, 24)")
    ),
    Refusal("headdim", {"k": torch.zeros(7, 2, 8)}, ("k has headdim 8", "q has 16")),
    Refusal("heads", {"q": torch.zeros(5, 3, 16)}, ("nheads=3", "multiple of nheads_k=2")),
    Refusal("cu_list", {"cu_seqlens_q": [0, 2, 5]}, ("cu_seqlens_q must be a torch.Tensor", "list")),
    Refusal("cu_none", {"cu_seqlens_k": None}, ("cu_seqlens_k must be a torch.Tensor", "NoneType")),
    Refusal("cu_q_int64", {"cu_seqlens_q": int32(0, 2, 5).long()}, ("cu_seqlens_q must be int32", "int64")),
    Refusal("cu_k_float", {"cu_seqlens_k": int32(0, 4, 7).float()}, ("cu_seqlens_k must be int32", "float32")),
    Refusal("cu_q_meta", {"cu_seqlens_q": int32(0, 2, 5).to("meta")}, ("cu_seqlens_q is on meta", "same device")),
    Refusal("cu_q_rank", {"cu_seqlens_q": int32([0, 2, 5])}, ("cu_seqlens_q must be (batch_size + 1)", "(1, 3)")),
    Refusal("cu_q_empty", {"cu_seqlens_q": int32()}, ("cu_seqlens_q must be (batch_size + 1,)", "no elements")),
    Refusal("cu_k_batch", {"cu_seqlens_k": int32(0, 7)}, ("cu_seqlens_k must be (batch_size + 1) = (3)", "(2,)")),
    Refusal("cu_q_start", {"cu_seqlens_q": int32(1, 2, 5)}, ("cu_seqlens_q must start at 0", "got 1")),
    Refusal("cu_k_start", {"cu_seqlens_k": int32(-1, 4, 7)}, ("cu_seqlens_k must start at 0", "got -1")),
    Refusal("cu_q_falls", {"cu_seqlens_q": int32(0, 6, 5)}, ("cu_seqlens_q must not decrease", "6 then 5 at index 2")),
    Refusal("cu_k_falls", {"cu_seqlens_k": int32(0, 8, 7)}, ("cu_seqlens_k must not decrease", "8 then 7 at index 2")),
    Refusal("cu_q_end", {"cu_seqlens_q": int32(0, 2, 4)}, ("cu_seqlens_q must end at", "tokens, 5", "got 4")),
    Refusal("cu_k_end", {"cu_seqlens_k": int32(0, 4, 9)}, ("cu_seqlens_k must end at", "tokens, 7", "got 9")),
    Refusal("max_q", {"max_seqlen_q": 2}, ("max_seqlen_q=2", "longest sequence, 3", "None derives it")),
    Refusal("max_k", {"max_seqlen_k": 3}, ("max_seqlen_k=3", "longest sequence, 4", "None derives it")),
    Refusal("max_q_negative", {"max_seqlen_q": -1}, ("max_seqlen_q=-1", "longest sequence, 3")),
    Refusal("max_q_float", {"max_seqlen_q": 3.0}, ("max_seqlen_q must be an integer", "3.0")),
    Refusal("max_k_text", {"max_seqlen_k": "4"}, ("max_seqlen_k must be an integer", "'4'")),
    Refusal(
        "bias",
        {"attn_bias": torch.zeros(5, 7)},
        ("attn_bias must broadcast to (nheads, total_q, max_seqlen_k) = (4, 5, 4)", "(5, 7)"),
    ),
    Refusal("bias_rank", {"attn_bias": torch.zeros(1, 4, 5, 4)}, ("attn_bias", "(4, 5, 4)", "(1, 4, 5, 4)")),
    Refusal("alibi_batch", {"alibi_slopes": torch.zeros(3, 4)}, ("alibi_slopes must be", "(2, 4)", "(3, 4)")),
    Refusal("sinks", {"sinks": torch.zeros(5)}, ("sinks must be (nheads) = (4,)", "(5,)")),
    Refusal(
        "blocks",
        {"block_mask": torch.ones(2, 4, 1, 2, dtype=torch.bool), "block_size": 64},
        ("block_mask must be", "(2 or 1, 4 or 1, 1, 1) with block_size=(64, 64)", "got shape (2, 4, 1, 2)"),
    ),
    Refusal(
        "blocks_of_torch",
        {"block_mask": create_block_mask(noop_mask, None, None, 5, 5, device="cpu")},
        ("block_mask is a BlockMask", "varlen call a bool tensor"),
    ),
    Refusal("scale", {"softmax_scale": float("nan")}, ("softmax_scale=nan", "finite")),
    Refusal("dropout", {"dropout_p": 2.0}, ("dropout_p=2.0", "below 1")),
    Refusal("window", {"window_size": (-3, 0)}, ("window_size=(-3, 0)", "-1 (unlimited)")),
)
def test_wrong_argument_is_refused(refusal: Refusal) -> None:
    fast_attn_varlen_func(**arguments())
    assert_refused(lambda: fast_attn_varlen_func(**(arguments() | refusal.changes)), refusal)


@refusals(
    Refusal("k_not_paged", {"k": torch.zeros(7, 2, 16)}, ("k must be (num_blocks, page_block_size", "(7, 2, 16)")),
    Refusal("v_not_paged", {"v": torch.zeros(7, 2, 24)}, ("v must be", "headdim_v)", "(7, 2, 24)")),
    Refusal("v_pages", {"v": torch.zeros(3, 2, 2, 24)}, ("k and v must hold the same tokens", "(3, 2, 2, 24)")),
    Refusal(
        "empty_pages",
        {"k": torch.zeros(4, 0, 2, 16), "v": torch.zeros(4, 0, 2, 24)},
        ("k must be (num_blocks, page_block_size", "at least one token", "(4, 0, 2, 16)"),
    ),
    Refusal("table_list", {"block_table": [[0, 1]]}, ("block_table must be a torch.Tensor", "list")),
    Refusal("table_int64", {"block_table": int32([0, 1], [3, 2]).long()}, ("block_table must be int32", "int64")),
    Refusal("table_batch", {"block_table": int32([0, 1])}, ("block_table must be", "(2, any)", "(1, 2)")),
    Refusal("table_rank", {"block_table": int32(0, 1)}, ("block_table must be (batch_size, max_blocks", "(2,)")),
    Refusal(
        "too_long",
        {"block_table": int32([0], [3])},
        ("cu_seqlens_k gives sequence 0 4 tokens", "block_table holds 2 at most"),
    ),
    Refusal("page_4", {"block_table": int32([0, 1], [4, 2])}, ("block_table names page 4", "sequence 1", "0 to 3")),
    Refusal("page_-1", {"block_table": int32([0, -1], [3, 2])}, ("block_table names page -1", "sequence 0", "0 to 3")),
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


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda x: fast_attn_qkvpacked_func(x),
            ("qkv must be (batch_size, seqlen, 3, nheads", "(2, 5, 4, 16)"),
        ),
        (
            lambda x: fast_attn_kvpacked_func(x, x),
            ("kv must be (batch_size, seqlen, 2, nheads, headdim)", "(2, 5, 4, 16)"),
        ),
        (
            lambda x: fast_attn_varlen_qkvpacked_func(x, int32(0, 2)),
            ("qkv must be (total, 3, nheads, headdim)", "(2, 5, 4, 16)"),
        ),
        (
            lambda x: fast_attn_varlen_kvpacked_func(x, x, int32(0, 2), int32(0, 2)),
            ("kv must be (total, 2, nheads, headdim)", "(2, 5, 4, 16)"),
        ),
    ],
    ids=["qkv", "kv", "varlen_qkv", "varlen_kv"],
)
def test_wrong_packing_is_refused(call: Callable[[torch.Tensor], object], says: tuple[str, ...]) -> None:
    assert_refused(lambda: call(torch.zeros(2, 5, 4, 16)), Refusal("shape", {}, says))


def test_packed_argument_must_be_a_tensor() -> None:
    refusal = Refusal("list", {}, ("qkv must be a torch.Tensor", "list"))
    assert_refused(lambda: fast_attn_qkvpacked_func([1.0]), refusal)  # type: ignore[arg-type]
