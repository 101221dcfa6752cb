"""Every wrong argument of fast_attn_with_kvcache; the caches stay as they were, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastattention import UnsupportedError, fast_attn_with_kvcache
from unit.refusals import Refusal, assert_refused, refusals


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments() -> dict[str, Any]:
    """A call that is accepted: two sequences of 3 and 5 tokens in a cache of 8, to which 2 tokens each are appended."""
    return {
        "q": torch.ones(2, 2, 4, 16),
        "k_cache": torch.full((2, 8, 2, 16), 7.0),
        "v_cache": torch.full((2, 8, 2, 24), 7.0),
        "k": torch.ones(2, 2, 2, 16),
        "v": torch.ones(2, 2, 2, 24),
        "rotary_cos": torch.ones(8, 4),
        "rotary_sin": torch.zeros(8, 4),
        "cache_seqlens": int32(3, 5),
        "backend": "sdpa",
    }


def paged_arguments() -> dict[str, Any]:
    """The same call with 5 pages of 4 tokens."""
    changes = {
        "k_cache": torch.full((5, 4, 2, 16), 7.0),
        "v_cache": torch.full((5, 4, 2, 24), 7.0),
        "block_table": int32([0, 1], [4, 2]),
    }
    return arguments() | changes


def quantized_arguments() -> dict[str, Any]:
    """The same call with a cache of int8."""
    changes = {
        "k_cache": torch.full((2, 8, 2, 16), 7, dtype=torch.int8),
        "v_cache": torch.full((2, 8, 2, 24), 7, dtype=torch.int8),
        "k_scale": torch.ones(2, 8, 2),
        "v_scale": torch.ones(2, 8, 2),
    }
    return arguments() | changes


def assert_refused_and_unwritten(given: dict[str, Any], refusal: Refusal) -> None:
    given = given | refusal.changes
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    caches = [given[name] for name in names if isinstance(given.get(name), torch.Tensor)]
    before = [cache.clone() for cache in caches]
    assert_refused(lambda: fast_attn_with_kvcache(**given), refusal)
    for cache, old in zip(caches, before, strict=True):
        if cache.device.type == "cpu":
            assert torch.equal(cache.contiguous().view(torch.uint8), old.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "given", [arguments(), paged_arguments(), quantized_arguments()], ids=["dense", "paged", "quantized"]
)
def test_the_call_without_changes_is_accepted_and_writes(given: dict[str, Any]) -> None:
    before = given["k_cache"].clone()
    assert fast_attn_with_kvcache(**given).shape == (2, 2, 4, 24)
    assert not torch.equal(given["k_cache"], before)


CACHES = (
    Refusal("q_none", {"q": None}, ("q must be a torch.Tensor", "NoneType")),
    Refusal("k_cache_none", {"k_cache": None}, ("k_cache must be a torch.Tensor", "NoneType")),
    Refusal("v_cache_list", {"v_cache": []}, ("v_cache must be a torch.Tensor", "list")),
    Refusal("q_rank", {"q": torch.ones(2, 4, 16)}, ("q must be (batch_size, seqlen_q", "(2, 4, 16)")),
    Refusal("k_cache_rank", {"k_cache": torch.ones(8, 2, 16)}, ("k_cache must be (batch_size_cache", "(8, 2, 16)")),
    Refusal("v_cache_rank", {"v_cache": torch.ones(24)}, ("v_cache must be", "headdim_v)", "(24,)")),
    Refusal(
        "k_cache_dtype",
        {"k_cache": torch.ones(2, 8, 2, 16, dtype=torch.float16)},
        ("k_cache has dtype torch.float16", "q has torch.float32"),
    ),
    Refusal("v_cache_meta", {"v_cache": torch.ones(2, 8, 2, 24, device="meta")}, ("v_cache is on meta", "q on cpu")),
    Refusal("headdim", {"k_cache": torch.ones(2, 8, 2, 8)}, ("k_cache has headdim 8", "q has 16")),
    Refusal("heads", {"v_cache": torch.ones(2, 8, 4, 24)}, ("v_cache has 4 heads", "k_cache has 2")),
    Refusal("v_cache_length", {"v_cache": torch.ones(2, 9, 2, 24)}, ("k_cache and v_cache must hold", "(2, 9, 2, 24)")),
    Refusal(
        "batch",
        {"k_cache": torch.ones(3, 8, 2, 16), "v_cache": torch.ones(3, 8, 2, 24)},
        ("k_cache holds 3 sequences", "q 2", "cache_batch_idx"),
    ),
    Refusal(
        "k_cache_strided",
        {"k_cache": torch.ones(2, 8, 2, 32)[..., ::2]},
        ("k_cache must have a contiguous last axis", "strides (512, 64, 32, 2)"),
    ),
    Refusal(
        "v_cache_strided",
        {"v_cache": torch.ones(2, 8, 24, 2).transpose(2, 3)},
        ("v_cache must have a contiguous last axis", "strides (384, 48, 1, 2)"),
    ),
    Refusal(
        "k_cache_expanded",
        {"k_cache": torch.ones(1, 8, 2, 16).expand(2, -1, -1, -1)},
        ("k_cache is expanded", "strides (0, 32, 16, 1)", "memory of their own"),
    ),
    Refusal(
        "v_cache_expanded",
        {"v_cache": torch.ones(1, 8, 2, 24).expand(2, -1, -1, -1)},
        ("v_cache is expanded", "strides (0, 48, 24, 1)", "memory of their own"),
    ),
)

LENGTHS = (
    Refusal("lengths_list", {"cache_seqlens": [3, 5]}, ("cache_seqlens must be an int32 tensor", "integer", "[3, 5]")),
    Refusal("lengths_float", {"cache_seqlens": 3.0}, ("cache_seqlens must be an int32 tensor", "integer", "3.0")),
    Refusal("lengths_int64", {"cache_seqlens": int32(3, 5).long()}, ("cache_seqlens must be int32", "int64")),
    Refusal("lengths_shape", {"cache_seqlens": int32(3)}, ("cache_seqlens must be (batch_size) = (2)", "(1,)")),
    Refusal("lengths_meta", {"cache_seqlens": int32(3, 5).to("meta")}, ("cache_seqlens is on meta", "same device")),
    Refusal("lengths_missing", {"cache_seqlens": None}, ("cache_seqlens=None", "k and v", "append")),
    Refusal("length_negative", {"cache_seqlens": int32(3, -1)}, ("cache_seqlens[1]=-1", "0 to 6")),
    Refusal("length_over", {"cache_seqlens": int32(7, 5)}, ("cache_seqlens[0]=7", "0 to 6", "8 tokens of capacity, 2")),
    Refusal("int_negative", {"cache_seqlens": -1}, ("cache_seqlens", "=-1", "0 to 6")),
    Refusal("int_over", {"cache_seqlens": 7}, ("cache_seqlens", "=7", "0 to 6")),
    Refusal("int_huge", {"cache_seqlens": 2**40}, ("cache_seqlens", f"={2**40}", "0 to 6")),
    Refusal("leftpad_int64", {"cache_leftpad": int32(0, 0).long()}, ("cache_leftpad must be int32", "int64")),
    Refusal("leftpad_shape", {"cache_leftpad": int32(0, 0, 0)}, ("cache_leftpad must be (batch_size) = (2)", "(3,)")),
    Refusal("leftpad_over", {"cache_leftpad": int32(3, 6)}, ("cache_leftpad[1]=6", "0 to cache_seqlens[1]=5")),
    Refusal("leftpad_negative", {"cache_leftpad": int32(-1, 0)}, ("cache_leftpad[0]=-1", "0 to cache_seqlens[0]=3")),
    Refusal("rows_int64", {"cache_batch_idx": int32(0, 1).long()}, ("cache_batch_idx must be int32", "int64")),
    Refusal("rows_shape", {"cache_batch_idx": int32(0)}, ("cache_batch_idx must be (batch_size) = (2)", "(1,)")),
    Refusal("rows_over", {"cache_batch_idx": int32(0, 2)}, ("cache_batch_idx[1]=2", "0 to 1", "sequences in k_cache")),
    Refusal("rows_negative", {"cache_batch_idx": int32(-1, 1)}, ("cache_batch_idx[0]=-1", "0 to 1")),
    Refusal("rows_repeat", {"cache_batch_idx": int32(1, 1)}, ("cache_batch_idx=[1, 1]", "must not repeat")),
)

NEW_TOKENS = (
    Refusal("k_alone", {"v": None}, ("k and v must be given together", "only k")),
    Refusal("v_alone", {"k": None}, ("k and v must be given together", "only v")),
    Refusal("k_list", {"k": []}, ("k must be a torch.Tensor", "list")),
    Refusal("k_rank", {"k": torch.ones(2, 2, 16)}, ("k must be (batch_size, seqlen_new, nheads_k", "(2, 2, 16)")),
    Refusal("k_batch", {"k": torch.ones(1, 2, 2, 16)}, ("k must be", "= (2, 2, 2, 16)", "(1, 2, 2, 16)")),
    Refusal("k_heads", {"k": torch.ones(2, 2, 4, 16)}, ("k must be", "= (2, 2, 2, 16)", "(2, 2, 4, 16)")),
    Refusal("v_length", {"v": torch.ones(2, 3, 2, 24)}, ("v must be", "= (2, 2, 2, 24)", "(2, 3, 2, 24)")),
    Refusal("v_headdim", {"v": torch.ones(2, 2, 2, 16)}, ("v must be", "= (2, 2, 2, 24)", "(2, 2, 2, 16)")),
    Refusal("k_dtype", {"k": torch.ones(2, 2, 2, 16, dtype=torch.bfloat16)}, ("k has dtype torch.bfloat16", "q has")),
    Refusal("v_meta", {"v": torch.ones(2, 2, 2, 24, device="meta")}, ("v is on meta", "q on cpu")),
)

ROTARY = (
    Refusal("no_tokens", {"k": None, "v": None}, ("rotary_cos must come with k and v", "none")),
    Refusal("cos_alone", {"rotary_sin": None}, ("rotary_cos and rotary_sin must be given together", "no rotary_sin")),
    Refusal("sin_alone", {"rotary_cos": None}, ("rotary_cos and rotary_sin must be given together", "no rotary_cos")),
    Refusal("cos_list", {"rotary_cos": [1.0]}, ("rotary_cos must be a torch.Tensor", "list")),
    Refusal("cos_rank", {"rotary_cos": torch.ones(8)}, ("rotary_cos must be (seqlen_rotary, rotary_dim / 2)", "(8,)")),
    Refusal("sin_shape", {"rotary_sin": torch.zeros(8, 5)}, ("rotary_sin must be", "= (8, 4)", "(8, 5)")),
    Refusal("cos_dtype", {"rotary_cos": torch.ones(8, 4).half()}, ("rotary_cos has dtype torch.float16", "q has")),
    Refusal("sin_dtype", {"rotary_sin": torch.ones(8, 4).double()}, ("rotary_sin has dtype torch.float64", "q has")),
    Refusal(
        "too_wide",
        {"rotary_cos": torch.ones(8, 9), "rotary_sin": torch.ones(8, 9)},
        ("rotary_dim=18", "rotary_cos.shape[1]", "2 to headdim=16"),
    ),
    Refusal(
        "no_width",
        {"rotary_cos": torch.ones(8, 0), "rotary_sin": torch.ones(8, 0)},
        ("rotary_dim=0", "rotary_cos.shape[1]", "2 to headdim=16"),
    ),
    Refusal(
        "too_short",
        {"rotary_cos": torch.ones(6, 4), "rotary_sin": torch.ones(6, 4)},
        ("rotary_cos has 6 positions", "needs 7"),
    ),
    Refusal(
        "too_short_for_queries",
        {"q": torch.ones(2, 4, 4, 16), "causal": True},
        ("rotary_cos has 8 positions", "needs 9"),
    ),
    Refusal("interleaved", {"rotary_interleaved": "no"}, ("rotary_interleaved must be True or False", "'no'")),
)

SCORES = (
    Refusal("bias", {"attn_bias": torch.ones(2, 7)}, ("attn_bias", "seqlen_q, capacity) = (2, 4, 2, 8)", "(2, 7)")),
    Refusal("alibi", {"alibi_slopes": torch.ones(4, 2)}, ("alibi_slopes must be", "(2, 4)", "(4, 2)")),
    Refusal("sinks", {"sinks": torch.ones(2)}, ("sinks must be (nheads) = (4,)", "(2,)")),
    Refusal("scale", {"softmax_scale": float("inf")}, ("softmax_scale=inf", "finite")),
    Refusal("softcap", {"softcap": -2.0}, ("softcap=-2.0", "at least 0")),
    Refusal("window", {"window_size": (0, -2)}, ("window_size=(0, -2)", "-1 (unlimited)")),
    Refusal("splits_negative", {"num_splits": -1}, ("num_splits=-1", "at least 0")),
    Refusal("splits_huge", {"num_splits": 2**31}, ("num_splits=2147483648", "below 2^31")),
    Refusal("splits_float", {"num_splits": 2.0}, ("num_splits must be an integer", "2.0")),
    Refusal("backend", {"backend": "nobody"}, ("backend='nobody'", "'auto'", "'sdpa'")),
)


@refusals(*CACHES, *LENGTHS, *NEW_TOKENS, *ROTARY, *SCORES)
def test_wrong_argument_is_refused_before_anything_is_written(refusal: Refusal) -> None:
    fast_attn_with_kvcache(**arguments())
    assert_refused_and_unwritten(arguments(), refusal)


@refusals(
    Refusal("table_int64", {"block_table": int32([0, 1], [4, 2]).long()}, ("block_table must be int32", "int64")),
    Refusal("table_rank", {"block_table": int32(0, 1)}, ("block_table must be (batch_size, max_blocks", "(2,)")),
    Refusal("table_scalar", {"block_table": int32(0)[0]}, ("block_table must be (batch_size, max_blocks", "()")),
    Refusal("table_batch", {"block_table": int32([0, 1])}, ("block_table must be", "(2, any)", "(1, 2)")),
    Refusal("table_list", {"block_table": [[0, 1], [4, 2]]}, ("block_table must be a torch.Tensor", "list")),
    Refusal(
        "rows",
        {"cache_batch_idx": int32(0, 1)},
        ("cache_batch_idx", "(2,) int32", "cannot be combined with block_"),
    ),
    Refusal(
        "no_slots",
        {"k_cache": torch.ones(5, 0, 2, 16), "v_cache": torch.ones(5, 0, 2, 24)},
        ("k_cache must be (num_blocks, page_block_size", "at least one token", "(5, 0, 2, 16)"),
    ),
    Refusal("page_5", {"block_table": int32([0, 5], [4, 2])}, ("block_table names page 5", "sequence 0", "0 to 4")),
    Refusal("page_-1", {"block_table": int32([0, 1], [4, -1])}, ("block_table names page -1", "sequence 1", "0 to 4")),
    Refusal("full", {"cache_seqlens": int32(7, 0)}, ("cache_seqlens[0]=7", "0 to 6", "8 tokens of capacity")),
    Refusal(
        "shared_place",
        {"block_table": int32([0, 1], [4, 1]), "cache_seqlens": int32(4, 5)},
        ("block_table puts two appended tokens into slot 1 of page 1", "a place of its own"),
    ),
    Refusal(
        "shared_place_of_single_tokens",
        {
            "k": torch.ones(2, 1, 2, 16),
            "v": torch.ones(2, 1, 2, 24),
            "block_table": int32([0, 1], [0, 2]),
            "cache_seqlens": int32(1, 1),
        },
        ("block_table puts two appended tokens into slot 1 of page 0", "a place of its own"),
    ),
)
def test_wrong_page_is_refused_before_anything_is_written(refusal: Refusal) -> None:
    fast_attn_with_kvcache(**paged_arguments())
    assert_refused_and_unwritten(paged_arguments(), refusal)


@refusals(
    Refusal("k_scale_alone", {"v_scale": None}, ("k_scale and v_scale must be given together", "only k_scale")),
    Refusal("v_scale_alone", {"k_scale": None}, ("k_scale and v_scale must be given together", "only v_scale")),
    Refusal("no_scales", {"k_scale": None, "v_scale": None}, ("k_cache has dtype torch.int8", "got no k_scale")),
    Refusal(
        "no_scales_float8",
        {"k_scale": None, "v_scale": None, "v_cache": torch.ones(2, 8, 2, 24).to(torch.float8_e4m3fn)},
        ("v_cache torch.float8_e4m3fn", "got no k_scale", "float32, one number a token and key head"),
    ),
    Refusal(
        "scales_of_float_caches",
        {"k_cache": torch.ones(2, 8, 2, 16), "v_cache": torch.ones(2, 8, 2, 24)},
        ("k_cache has dtype torch.float32", "both must be torch.int8 or torch.float8_e4m3fn"),
    ),
    Refusal(
        "other_integers",
        {"k_cache": torch.ones(2, 8, 2, 16).short(), "v_cache": torch.ones(2, 8, 2, 24).short()},
        ("k_cache has dtype torch.int16", "both must be torch.int8 or torch.float8_e4m3fn"),
    ),
    Refusal(
        "two_dtypes",
        {"v_cache": torch.ones(2, 8, 2, 24).to(torch.float8_e4m3fn)},
        ("k_cache has dtype torch.int8 and v_cache torch.float8_e4m3fn", "both must be"),
    ),
    Refusal("one_quantized", {"k_cache": torch.ones(2, 8, 2, 16)}, ("k_cache has dtype torch.float32", "both must be")),
    Refusal("k_scale_list", {"k_scale": [1.0]}, ("k_scale must be a torch.Tensor", "list")),
    Refusal("k_scale_dtype", {"k_scale": torch.ones(2, 8, 2).half()}, ("k_scale must be float32", "torch.float16")),
    Refusal("v_scale_meta", {"v_scale": torch.ones(2, 8, 2, device="meta")}, ("v_scale is on meta", "caches on cpu")),
    Refusal(
        "k_scale_rank",
        {"k_scale": torch.ones(2, 8, 2, 1)},
        ("k_scale must be (batch_size_cache, seqlen_cache, nheads_k) = (2, 8, 2)", "(2, 8, 2, 1)"),
    ),
    Refusal("v_scale_shape", {"v_scale": torch.ones(2, 8, 1)}, ("v_scale must be", "= (2, 8, 2)", "(2, 8, 1)")),
    Refusal(
        "v_scale_expanded",
        {"v_scale": torch.ones(2, 8, 1).expand(-1, -1, 2)},
        ("v_scale is expanded", "strides (8, 1, 0)", "memory of their own"),
    ),
    Refusal("k_dtype", {"k": torch.ones(2, 2, 2, 16, dtype=torch.int8)}, ("k has dtype torch.int8", "q has")),
    Refusal(
        "v_cache_strided",
        {"v_cache": torch.ones(2, 8, 24, 2, dtype=torch.int8).transpose(2, 3)},
        ("v_cache must have a contiguous last axis",),
    ),
)
def test_wrong_scale_is_refused_before_anything_is_written(refusal: Refusal) -> None:
    fast_attn_with_kvcache(**quantized_arguments())
    assert_refused_and_unwritten(quantized_arguments(), refusal)


def test_scales_of_pages_are_named_by_their_axes() -> None:
    scales = {name: torch.ones(5, 4, 2) for name in ("k_scale", "v_scale")}
    stored = {name: paged_arguments()[name].to(torch.int8) for name in ("k_cache", "v_cache")}
    given = paged_arguments() | stored | scales
    assert fast_attn_with_kvcache(**given).shape == (2, 2, 4, 24)
    wrong = Refusal("", {"k_scale": torch.ones(4, 5, 2)}, ("k_scale must be (num_blocks, page_block_size, nheads_k)",))
    assert_refused_and_unwritten(given, wrong)


def test_a_scale_that_is_only_read_may_be_expanded() -> None:
    given = quantized_arguments() | {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}
    one = torch.ones(1).expand(2, 8, 2)
    assert fast_attn_with_kvcache(**(given | {"k_scale": one, "v_scale": one})).shape == (2, 2, 4, 24)


def test_gradients_of_scales_are_refused() -> None:
    given = quantized_arguments()
    given["k_scale"].requires_grad_()
    with pytest.raises(UnsupportedError, match="no backward"):
        fast_attn_with_kvcache(**given)


def test_sequences_may_share_pages_that_they_only_read() -> None:
    given = paged_arguments() | {"block_table": int32([0, 1], [0, 2]), "cache_seqlens": int32(4, 4)}
    assert fast_attn_with_kvcache(**given).shape == (2, 2, 4, 24)


def test_unused_entries_of_a_block_table_may_hold_anything() -> None:
    given = paged_arguments() | {"block_table": int32([0, 1, 9], [4, 2, -3])}
    assert fast_attn_with_kvcache(**given).shape == (2, 2, 4, 24)


def test_rows_may_repeat_when_nothing_is_appended() -> None:
    given = arguments() | {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}
    given["k_cache"].normal_()
    given |= {"cache_batch_idx": int32(1, 1), "cache_seqlens": int32(4, 4)}
    out = fast_attn_with_kvcache(**given)
    assert torch.equal(out[0], out[1])


def test_queries_without_a_mask_need_no_more_positions_than_the_append() -> None:
    given = arguments() | {"q": torch.ones(2, 4, 4, 16)}  # all of q is rotated by one position; 7 rows suffice
    given |= {"rotary_cos": torch.ones(7, 4), "rotary_sin": torch.zeros(7, 4)}
    assert fast_attn_with_kvcache(**given).shape == (2, 4, 4, 24)


def test_gradients_are_refused_before_anything_is_written() -> None:
    given = arguments()
    given["k"].requires_grad_()
    before = given["k_cache"].clone()
    with pytest.raises(UnsupportedError, match=r"no backward.*torch\.no_grad\(\)"):
        fast_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"], before)
    with torch.no_grad():
        fast_attn_with_kvcache(**given)
    assert not torch.equal(given["k_cache"], before)


def test_one_length_for_all_is_the_tensor_of_it() -> None:
    torch.manual_seed(0)
    given = arguments()
    given["k_cache"].normal_()
    given["v_cache"].normal_()
    other = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    out = fast_attn_with_kvcache(**(given | {"cache_seqlens": 4}))
    assert torch.equal(out, fast_attn_with_kvcache(**(other | {"cache_seqlens": int32(4, 4)})))
    assert torch.equal(given["k_cache"], other["k_cache"])


def test_without_lengths_the_cache_is_full() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
    out = fast_attn_with_kvcache(q, k, v, backend="sdpa")
    assert torch.equal(out, fast_attn_with_kvcache(q, k, v, cache_seqlens=8, backend="sdpa"))


def test_keys_and_values_in_one_memory_are_refused_where_tokens_are_appended() -> None:
    given = quantized_arguments()
    given["v_cache"], given["v"] = torch.full((2, 8, 2, 16), 7, dtype=torch.int8), torch.ones(2, 2, 2, 16)
    for ours, theirs in (("k_cache", "v_cache"), ("k_scale", "v_scale")):
        assert_refused_and_unwritten(
            given | {theirs: given[ours]}, Refusal("same", {}, (f"{ours} and {theirs} are the same memory", "twice"))
        )
    reading = {name: value for name, value in given.items() if name not in ("k", "v", "rotary_cos", "rotary_sin")}
    fast_attn_with_kvcache(**reading | {"v_cache": given["k_cache"], "v_scale": given["k_scale"]})


def latent_arguments() -> dict[str, Any]:
    """The same call without rotary tables; values are the first 12 columns of the keys, in the same memory."""
    given = {name: value for name, value in arguments().items() if not name.startswith("rotary")}
    k = torch.arange(2 * 2 * 2 * 16.0).view(2, 2, 2, 16)
    return given | {"k": k, "v": k[..., :12], "v_cache": given["k_cache"][..., :12]}


def test_values_in_the_keys_are_appended_with_them() -> None:
    given = latent_arguments()
    fast_attn_with_kvcache(**given)
    assert torch.equal(given["k_cache"][0, 3:5], given["k"][0])
    assert torch.equal(given["v_cache"][1, 5:7], given["k"][1, ..., :12])
    fast_attn_with_kvcache(**latent_arguments() | {"v": latent_arguments()["v"].clone()})


def test_other_new_values_than_in_the_keys_are_refused() -> None:
    given = latent_arguments()
    given["v"] = given["v"].clone()
    given["v"][1, 1, 1, 11] += 1.0
    assert_refused_and_unwritten(given, Refusal("v", {}, ("v must be k[..., :headdim_v]", "other numbers")))


def test_rotary_tables_that_would_turn_values_are_refused() -> None:
    tables = {name: arguments()[name] for name in ("rotary_cos", "rotary_sin")}
    refusal = Refusal("rotary", tables, ("rotary_cos and rotary_sin cannot be given", "v_cache shares the memory"))
    assert_refused_and_unwritten(latent_arguments(), refusal)


@pytest.mark.parametrize("headdim_v", [12, 20])
def test_values_elsewhere_in_the_keys_are_refused_where_tokens_are_appended(headdim_v: int) -> None:
    """The values have other strides, or are wider than the keys."""
    memory, given = torch.full((2 * 8 * 40,), 7.0), latent_arguments()
    given["k_cache"] = memory.as_strided((2, 8, 2, 16), (320, 40, 20, 1))
    strides = (256, 32, 16, 1) if headdim_v == 12 else (320, 40, 20, 1)
    given |= {"v_cache": memory.as_strided((2, 8, 2, headdim_v), strides), "v": torch.ones(2, 2, 2, headdim_v)}
    refusal = Refusal("v_cache", {}, ("v_cache begins where k_cache does", "k_cache[..., :headdim_v]"))
    assert_refused_and_unwritten(given, refusal)


def test_caches_without_room_may_be_one_memory_to_which_nothing_is_appended() -> None:
    cache, new = torch.empty(2, 0, 2, 16), torch.empty(2, 0, 2, 16)
    out = fast_attn_with_kvcache(torch.ones(2, 2, 4, 16), cache, cache, new, new.clone(), cache_seqlens=0)
    assert torch.equal(out, torch.zeros(2, 2, 4, 16))
