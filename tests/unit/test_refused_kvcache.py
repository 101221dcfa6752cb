"""Every wrong argument of fast_attn_with_kvcache; the caches stay as they were, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import full, ones, zeros

from fastattention import UnsupportedError, fast_attn_with_kvcache
from unit.refusals import Refusal, assert_refused, refusals, refused
from unit.samples import int32

NO_NEW_TOKENS = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}
NO_SCALES = {"k_scale": None, "v_scale": None}
FLOAT8 = {"v_cache": ones(2, 8, 2, 24).to(torch.float8_e4m3fn)}
ONE_TOKEN = {"k": ones(2, 1, 2, 16), "v": ones(2, 1, 2, 24)}


def caches(rows: int, tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "k_cache": full((rows, tokens, 2, 16), 7, dtype=dtype),
        "v_cache": full((rows, tokens, 2, 24), 7, dtype=dtype),
    }


def arguments() -> dict[str, Any]:
    """A call that is accepted: two sequences of 3 and 5 tokens in a cache of 8, to which 2 tokens each are appended."""
    new = {"k": ones(2, 2, 2, 16), "v": ones(2, 2, 2, 24), "rotary_cos": ones(8, 4), "rotary_sin": zeros(8, 4)}
    return {"q": ones(2, 2, 4, 16), "cache_seqlens": int32(3, 5), "backend": "sdpa"} | caches(2, 8) | new


def paged_arguments() -> dict[str, Any]:
    """The same call with 5 pages of 4 tokens."""
    return arguments() | caches(5, 4) | {"block_table": int32([0, 1], [4, 2])}


def quantized_arguments() -> dict[str, Any]:
    """The same call with a cache of int8."""
    return arguments() | caches(2, 8, torch.int8) | {"k_scale": ones(2, 8, 2), "v_scale": ones(2, 8, 2)}


def assert_refused_and_unwritten(given: dict[str, Any], refusal: Refusal) -> None:
    given = given | refusal.changes
    names = ("k_cache", "v_cache", "k_scale", "v_scale")
    before = {name: given[name].clone() for name in names if isinstance(given.get(name), torch.Tensor)}
    assert_refused(lambda: fast_attn_with_kvcache(**given), refusal)
    for name, old in before.items():
        cache = given[name]
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
    refused("q must be a torch.Tensor", "NoneType", q=None),
    refused("k_cache must be a torch.Tensor", "NoneType", k_cache=None),
    refused("v_cache must be a torch.Tensor", "list", v_cache=[]),
    refused("q must be (batch_size, seqlen_q", "(2, 4, 16)", q=ones(2, 4, 16)),
    refused("k_cache must be (batch_size_cache", "(8, 2, 16)", k_cache=ones(8, 2, 16)),
    refused("v_cache must be", "headdim_v)", "(24,)", v_cache=ones(24)),
    refused("k_cache has dtype torch.float16", "q has torch.float32", k_cache=ones(2, 8, 2, 16, dtype=torch.float16)),
    refused("v_cache is on meta", "q on cpu", v_cache=ones(2, 8, 2, 24, device="meta")),
    refused("k_cache has headdim 8", "q has 16", k_cache=ones(2, 8, 2, 8)),
    refused("v_cache has 4 heads", "k_cache has 2", v_cache=ones(2, 8, 4, 24)),
    refused("k_cache and v_cache must hold", "(2, 9, 2, 24)", v_cache=ones(2, 9, 2, 24)),
    refused("k_cache holds 3 sequences", "q 2", "cache_batch_idx", **caches(3, 8)),
    refused("k_cache must have a contiguous last", "strides (512, 64, 32, 2)", k_cache=ones(2, 8, 2, 32)[..., ::2]),
    refused("v_cache must have a contiguous last axis", "strides (384, 48, 1, 2)", v_cache=ones(2, 8, 24, 2).mT),
    refused("k_cache is expanded", "(0, 32, 16, 1)", "memory of their own", k_cache=ones(8, 2, 16).expand(2, 8, 2, 16)),
    refused("v_cache is expanded", "(0, 48, 24, 1)", "memory of their own", v_cache=ones(8, 2, 24).expand(2, 8, 2, 24)),
)

LENGTHS = (
    refused("cache_seqlens must be an int32 tensor", "integer", "[3, 5]", cache_seqlens=[3, 5]),
    refused("cache_seqlens must be an int32 tensor", "integer", "3.0", cache_seqlens=3.0),
    refused("cache_seqlens must be int32", "int64", "cache_seqlens.int()", cache_seqlens=int32(3, 5).long()),
    refused("cache_seqlens must be (batch_size) = (2)", "(1,)", cache_seqlens=int32(3)),
    refused("cache_seqlens is on meta", "same device", cache_seqlens=int32(3, 5).to("meta")),
    refused("cache_seqlens=None", "k and v", "append", cache_seqlens=None),
    refused("cache_seqlens[1]=-1", "0 to 6", cache_seqlens=int32(3, -1)),
    refused("cache_seqlens[0]=7", "0 to 6", "8 tokens of capacity, 2", cache_seqlens=int32(7, 5)),
    refused("cache_seqlens", "=-1", "0 to 6", cache_seqlens=-1),
    refused("cache_seqlens", "=7", "0 to 6", cache_seqlens=7),
    refused("cache_seqlens", f"={2**40}", "0 to 6", cache_seqlens=2**40),
    refused("cache_leftpad must be int32", "int64", cache_leftpad=int32(0, 0).long()),
    refused("cache_leftpad must be (batch_size) = (2)", "(3,)", cache_leftpad=int32(0, 0, 0)),
    refused("cache_leftpad[1]=6", "0 to cache_seqlens[1]=5", cache_leftpad=int32(3, 6)),
    refused("cache_leftpad[0]=-1", "0 to cache_seqlens[0]=3", cache_leftpad=int32(-1, 0)),
    refused("cache_batch_idx must be int32", "int64", cache_batch_idx=int32(0, 1).long()),
    refused("cache_batch_idx must be (batch_size) = (2)", "(1,)", cache_batch_idx=int32(0)),
    refused("cache_batch_idx[1]=2", "0 to 1", "sequences in k_cache", cache_batch_idx=int32(0, 2)),
    refused("cache_batch_idx[0]=-1", "0 to 1", cache_batch_idx=int32(-1, 1)),
    refused("cache_batch_idx=[1, 1]", "must not repeat", cache_batch_idx=int32(1, 1)),
)

NEW_TOKENS = (
    refused("k and v must be given together", "only k", v=None),
    refused("k and v must be given together", "only v", k=None),
    refused("k must be a torch.Tensor", "list", k=[]),
    refused("k must be (batch_size, seqlen_new, nheads_k", "(2, 2, 16)", k=ones(2, 2, 16)),
    refused("k must be", "= (2, 2, 2, 16)", "(1, 2, 2, 16)", k=ones(1, 2, 2, 16)),
    refused("k must be", "= (2, 2, 2, 16)", "(2, 2, 4, 16)", k=ones(2, 2, 4, 16)),
    refused("v must be", "= (2, 2, 2, 24)", "(2, 3, 2, 24)", v=ones(2, 3, 2, 24)),
    refused("v must be", "= (2, 2, 2, 24)", "(2, 2, 2, 16)", v=ones(2, 2, 2, 16)),
    refused("k has dtype torch.bfloat16", "q has", k=ones(2, 2, 2, 16, dtype=torch.bfloat16)),
    refused("v is on meta", "q on cpu", v=ones(2, 2, 2, 24, device="meta")),
)

ROTARY = (
    refused("rotary_cos must come with k and v", "none", k=None, v=None),
    refused("rotary_cos and rotary_sin must be given together", "no rotary_sin", rotary_sin=None),
    refused("rotary_cos and rotary_sin must be given together", "no rotary_cos", rotary_cos=None),
    refused("rotary_cos must be a torch.Tensor", "list", rotary_cos=[1.0]),
    refused("rotary_cos must be (seqlen_rotary, rotary_dim / 2)", "(8,)", rotary_cos=ones(8)),
    refused("rotary_sin must be", "= (8, 4)", "(8, 5)", rotary_sin=zeros(8, 5)),
    refused("rotary_cos has dtype torch.float16", "q has", rotary_cos=ones(8, 4).half()),
    refused("rotary_sin has dtype torch.float64", "q has", rotary_sin=ones(8, 4).double()),
    refused("rotary_dim=18", "rotary_cos.shape[1]", "2 to headdim=16", rotary_cos=ones(8, 9), rotary_sin=ones(8, 9)),
    refused("rotary_dim=0", "rotary_cos.shape[1]", "2 to headdim=16", rotary_cos=ones(8, 0), rotary_sin=ones(8, 0)),
    refused("rotary_cos has 6 positions", "needs 7", rotary_cos=ones(6, 4), rotary_sin=ones(6, 4)),
    refused("rotary_cos has 8 positions", "needs 9", q=ones(2, 4, 4, 16), causal=True),
    refused("rotary_interleaved must be True or False", "'no'", rotary_interleaved="no"),
)

SCORES = (
    refused("attn_bias", "seqlen_q, capacity) = (2, 4, 2, 8)", "(2, 7)", attn_bias=ones(2, 7)),
    refused("alibi_slopes must be", "(2, 4)", "(4, 2)", alibi_slopes=ones(4, 2)),
    refused("sinks must be (nheads) = (4,)", "(2,)", sinks=ones(2)),
    refused("softmax_scale=inf", "finite", softmax_scale=float("inf")),
    refused("softcap=-2.0", "at least 0", softcap=-2.0),
    refused("window_size=(0, -2)", "-1 (unlimited)", window_size=(0, -2)),
    refused("num_splits=-1", "at least 0", num_splits=-1),
    refused("num_splits=2147483648", "below 2^31", num_splits=2**31),
    refused("num_splits must be an integer", "2.0", num_splits=2.0),
    refused("backend='nobody'", "'auto'", "'sdpa'", backend="nobody"),
)


@refusals(*CACHES, *LENGTHS, *NEW_TOKENS, *ROTARY, *SCORES)
def test_wrong_argument_is_refused_before_anything_is_written(refusal: Refusal) -> None:
    fast_attn_with_kvcache(**arguments())
    assert_refused_and_unwritten(arguments(), refusal)


@refusals(
    refused("block_table must be int32", "int64", block_table=int32([0, 1], [4, 2]).long()),
    refused("block_table must be (batch_size, max_blocks", "(2,)", block_table=int32(0, 1)),
    refused("block_table must be (batch_size, max_blocks", "()", block_table=int32(0)[0]),
    refused("block_table must be", "(2, any)", "(1, 2)", block_table=int32([0, 1])),
    refused("block_table must be a torch.Tensor", "list", block_table=[[0, 1], [4, 2]]),
    refused("cache_batch_idx", "(2,) int32", "cannot be combined with block_", cache_batch_idx=int32(0, 1)),
    refused("k_cache must be (num_blocks, page_block_size", "at least one token", "(5, 0, 2, 16)", **caches(5, 0)),
    refused("block_table names page 5", "sequence 0", "0 to 4", block_table=int32([0, 5], [4, 2])),
    refused("block_table names page -1", "sequence 1", "0 to 4", block_table=int32([0, 1], [4, -1])),
    refused("cache_seqlens[0]=7", "0 to 6", "8 tokens of capacity", cache_seqlens=int32(7, 0)),
    refused(
        "block_table puts two appended tokens into slot 1 of page 1",
        "a place of its own",
        block_table=int32([0, 1], [4, 1]),
        cache_seqlens=int32(4, 5),
    ),
    refused(
        "block_table puts two appended tokens into slot 1 of page 0",
        "a place of its own",
        **ONE_TOKEN,
        block_table=int32([0, 1], [0, 2]),
        cache_seqlens=int32(1, 1),
    ),
)
def test_wrong_page_is_refused_before_anything_is_written(refusal: Refusal) -> None:
    fast_attn_with_kvcache(**paged_arguments())
    assert_refused_and_unwritten(paged_arguments(), refusal)


@refusals(
    refused("k_scale and v_scale must be given together", "only k_scale", v_scale=None),
    refused("k_scale and v_scale must be given together", "only v_scale", k_scale=None),
    refused("k_cache has dtype torch.int8", "got no k_scale", k_scale=None, v_scale=None),
    refused(
        "v_cache torch.float8_e4m3fn",
        "got no k_scale",
        "float32, one number a token and key head",
        **NO_SCALES,
        **FLOAT8,
    ),
    refused("k_cache has dtype torch.float32", "both must be torch.int8 or torch.float8_e4m3fn", **caches(2, 8)),
    refused(
        "k_cache has dtype torch.int16", "both must be torch.int8 or torch.float8_e4m3fn", **caches(2, 8, torch.int16)
    ),
    refused("k_cache has dtype torch.int8 and v_cache torch.float8_e4m3fn", "both must be", **FLOAT8),
    refused("k_cache has dtype torch.float32", "both must be", k_cache=ones(2, 8, 2, 16)),
    refused("k_scale must be a torch.Tensor", "list", k_scale=[1.0]),
    refused("k_scale must be float32", "torch.float16", k_scale=ones(2, 8, 2).half()),
    refused("v_scale is on meta", "caches on cpu", v_scale=ones(2, 8, 2, device="meta")),
    refused(
        "k_scale must be (batch_size_cache, seqlen_cache, nheads_k) = (2, 8, 2)",
        "(2, 8, 2, 1)",
        k_scale=ones(2, 8, 2, 1),
    ),
    refused("v_scale must be", "= (2, 8, 2)", "(2, 8, 1)", v_scale=ones(2, 8, 1)),
    refused("v_scale is expanded", "strides (8, 1, 0)", "memory of their own", v_scale=ones(2, 8, 1).expand(-1, -1, 2)),
    refused("k has dtype torch.int8", "q has", k=ones(2, 2, 2, 16, dtype=torch.int8)),
    refused("v_cache must have a contiguous last axis", v_cache=ones(2, 8, 24, 2, dtype=torch.int8).transpose(2, 3)),
)
def test_wrong_scale_is_refused_before_anything_is_written(refusal: Refusal) -> None:
    fast_attn_with_kvcache(**quantized_arguments())
    assert_refused_and_unwritten(quantized_arguments(), refusal)


def test_scales_of_pages_are_named_by_their_axes() -> None:
    scales = {name: ones(5, 4, 2) for name in ("k_scale", "v_scale")}
    stored = {name: paged_arguments()[name].to(torch.int8) for name in ("k_cache", "v_cache")}
    given = paged_arguments() | stored | scales
    assert fast_attn_with_kvcache(**given).shape == (2, 2, 4, 24)
    wrong = refused("k_scale must be (num_blocks, page_block_size, nheads_k)", k_scale=ones(4, 5, 2))
    assert_refused_and_unwritten(given, wrong)


def test_a_scale_that_is_only_read_may_be_expanded() -> None:
    given = quantized_arguments() | NO_NEW_TOKENS
    one = ones(1).expand(2, 8, 2)
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
    given = arguments() | NO_NEW_TOKENS
    given["k_cache"].normal_()
    given |= {"cache_batch_idx": int32(1, 1), "cache_seqlens": int32(4, 4)}
    out = fast_attn_with_kvcache(**given)
    assert torch.equal(out[0], out[1])


def test_queries_without_a_mask_need_no_more_positions_than_the_append() -> None:
    given = arguments() | {"q": ones(2, 4, 4, 16)}  # all of q is rotated by one position; 7 rows suffice
    given |= {"rotary_cos": ones(7, 4), "rotary_sin": zeros(7, 4)}
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
    given["v_cache"], given["v"] = full((2, 8, 2, 16), 7, dtype=torch.int8), ones(2, 2, 2, 16)
    for ours, theirs in (("k_cache", "v_cache"), ("k_scale", "v_scale")):
        assert_refused_and_unwritten(
            given | {theirs: given[ours]}, refused(f"{ours} and {theirs} are the same memory", "twice")
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
    assert_refused_and_unwritten(given, refused("v must be k[..., :headdim_v]", "other numbers"))


def test_rotary_tables_that_would_turn_values_are_refused() -> None:
    tables = {name: arguments()[name] for name in ("rotary_cos", "rotary_sin")}
    refusal = refused("rotary_cos and rotary_sin cannot be given", "v_cache shares the memory", **tables)
    assert_refused_and_unwritten(latent_arguments(), refusal)


@pytest.mark.parametrize("headdim_v", [12, 20])
def test_values_elsewhere_in_the_keys_are_refused_where_tokens_are_appended(headdim_v: int) -> None:
    """The values have other strides, or are wider than the keys."""
    memory, given = full((2 * 8 * 40,), 7.0), latent_arguments()
    given["k_cache"] = memory.as_strided((2, 8, 2, 16), (320, 40, 20, 1))
    strides = (256, 32, 16, 1) if headdim_v == 12 else (320, 40, 20, 1)
    given |= {"v_cache": memory.as_strided((2, 8, 2, headdim_v), strides), "v": ones(2, 2, 2, headdim_v)}
    refusal = refused("v_cache begins where k_cache does", "k_cache[..., :headdim_v]")
    assert_refused_and_unwritten(given, refusal)


def test_caches_without_room_may_be_one_memory_to_which_nothing_is_appended() -> None:
    cache, new = torch.empty(2, 0, 2, 16), torch.empty(2, 0, 2, 16)
    out = fast_attn_with_kvcache(ones(2, 2, 4, 16), cache, cache, new, new.clone(), cache_seqlens=0)
    assert torch.equal(out, zeros(2, 2, 4, 16))
