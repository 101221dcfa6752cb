"""Append with rotary embedding, compared with a loop over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastattention.attention.problem import Inputs, Problem
from fastattention.attention.validation import KvCacheArguments, Options, prepare_kvcache
from fastattention.backends.common.kv_append import append_tokens
from fastattention.quantized import quantize

BATCH_SIZE, SEQLEN_Q, SEQLEN_NEW, NHEADS, NHEADS_K, HEADDIM, CAPACITY = 3, 2, 3, 4, 2, 16, 12
LENGTHS = (0, 4, 9)
PAGE = 4


def rotary_tables(rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(CAPACITY), 100.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def prepared(
    cache: str = "dense",
    rotary_dim: int = 0,
    interleaved: bool = True,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Problem, Inputs]:
    paged = cache == "paged"
    rows = (BATCH_SIZE * CAPACITY // PAGE + 1, PAGE) if paged else (BATCH_SIZE + 2, CAPACITY)
    tables = rotary_tables(rotary_dim, dtype) if rotary_dim else (None, None)
    arguments = KvCacheArguments(
        torch.randn(BATCH_SIZE, SEQLEN_Q, NHEADS, HEADDIM).to(dtype),
        torch.randn(*rows, NHEADS_K, HEADDIM).to(dtype),
        torch.randn(*rows, NHEADS_K, 8).to(dtype),
        torch.randn(BATCH_SIZE, SEQLEN_NEW, NHEADS_K, HEADDIM).to(dtype),
        torch.randn(BATCH_SIZE, SEQLEN_NEW, NHEADS_K, 8).to(dtype),
        *tables,
        cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
        cache_batch_idx=None if paged else torch.tensor([4, 0, 2], dtype=torch.int32),
        block_table=torch.randperm(9).view(BATCH_SIZE, 3).int() if paged else None,
    )
    return prepare_kvcache(arguments, Options(causal=causal, rotary_interleaved=interleaved))


def place(inputs: Inputs, sequence: int, position: int) -> tuple[int, int]:
    """Indices of the first two axes of a cache."""
    if inputs.block_table is not None:
        return int(inputs.block_table[sequence, position // PAGE]), position % PAGE
    return int(inputs.cache_batch_idx[sequence]), position


def new_tokens(inputs: Inputs) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """(sequence, index among its new tokens, position, place in the cache) of each."""
    for sequence, length in enumerate(LENGTHS):
        for index in range(SEQLEN_NEW):
            yield sequence, index, length + index, place(inputs, sequence, length + index)


def rotated_by_hand(x: Tensor, inputs: Inputs, position: int, interleaved: bool) -> Tensor:
    """One token (heads, headdim), pair by pair, in float64."""
    cos, sin = inputs.rotary_cos[position].tolist(), inputs.rotary_sin[position].tolist()
    result = x.double().clone()
    half = len(cos)
    for index in range(half):
        first, second = (2 * index, 2 * index + 1) if interleaved else (index, index + half)
        a, b = x[:, first].double(), x[:, second].double()
        result[:, first] = a * cos[index] - b * sin[index]
        result[:, second] = a * sin[index] + b * cos[index]
    return result


@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_tokens_go_behind_those_in_the_cache_and_nowhere_else(cache: str) -> None:
    problem, inputs = prepared(cache)
    expected_k, expected_v = inputs.k.clone(), inputs.v.clone()
    for sequence, index, _, where in new_tokens(inputs):
        expected_k[where] = inputs.k_new[sequence, index]
        expected_v[where] = inputs.v_new[sequence, index]
    q = append_tokens(problem, inputs)
    assert q is inputs.q
    assert torch.equal(inputs.k, expected_k)
    assert torch.equal(inputs.v, expected_v)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("rotary_dim", [2, 8, HEADDIM])
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_keys_are_rotated_by_their_position_and_values_are_not(cache: str, rotary_dim: int, interleaved: bool) -> None:
    problem, inputs = prepared(cache, rotary_dim, interleaved)
    append_tokens(problem, inputs)
    for sequence, index, position, where in new_tokens(inputs):
        expected = rotated_by_hand(inputs.k_new[sequence, index], inputs, position, interleaved)
        torch.testing.assert_close(inputs.k[where].double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(inputs.v[where], inputs.v_new[sequence, index])


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "halves"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_queries_are_successive_tokens_only_under_a_mask(causal: bool, interleaved: bool) -> None:
    problem, inputs = prepared("dense", 8, interleaved, causal)
    q = append_tokens(problem, inputs)
    for sequence, length in enumerate(LENGTHS):
        for index in range(SEQLEN_Q):
            position = length + index if causal else length
            expected = rotated_by_hand(inputs.q[sequence, index], inputs, position, interleaved)
            torch.testing.assert_close(q[sequence, index].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    problem, inputs = prepared("dense", HEADDIM, dtype=dtype)
    q = append_tokens(problem, inputs)
    exact = rotated_by_hand(inputs.q[2, 1], inputs, LENGTHS[2] + 1, interleaved=True)
    # One rounding is half a unit in the last place; the float32 arithmetic before it adds next to nothing.
    unit = torch.finfo(dtype).eps
    assert ((q[2, 1].double() - exact).abs() <= 0.51 * unit * exact.abs().clamp(min=2**-10)).all()


@pytest.mark.parametrize("rotary_dim", [0, 8], ids=["plain", "rotary"])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
@pytest.mark.parametrize("cache", ["dense", "paged"])
def test_tokens_are_quantized_once_after_rotation(cache: str, cache_dtype: torch.dtype, rotary_dim: int) -> None:
    """bfloat16 tokens, whose rotation is not rounded to bfloat16 on the way."""
    problem, inputs = prepared(cache, rotary_dim, dtype=torch.bfloat16)
    stored = {name: getattr(inputs, name).to(cache_dtype) for name in ("k", "v")}
    scales = {f"{name}_scale": torch.full(inputs.k.shape[:-1], 7.0) for name in ("k", "v")}
    problem, inputs = replace(problem, cache_dtype=cache_dtype), inputs._replace(**stored, **scales)
    before = inputs._replace(k=inputs.k.float(), v=inputs.v.float(), **{n: x.clone() for n, x in scales.items()})
    append_tokens(problem, inputs)
    for sequence, index, position, where in new_tokens(inputs):
        new_k = inputs.k_new[sequence, index].float()
        if rotary_dim:
            new_k = rotated_by_hand(new_k, inputs, position, interleaved=True).float()
        for name, new in (("k", new_k), ("v", inputs.v_new[sequence, index])):
            wanted, scale = quantize(new, cache_dtype)
            assert torch.equal(getattr(inputs, name)[where].float(), wanted.float())
            torch.testing.assert_close(getattr(inputs, f"{name}_scale")[where], scale)
            getattr(before, name)[where] = wanted.float()
            getattr(before, f"{name}_scale")[where] = getattr(inputs, f"{name}_scale")[where]
    for name in ("k", "v", "k_scale", "v_scale"):
        assert torch.equal(getattr(inputs, name).float(), getattr(before, name)), f"{name} was written elsewhere"


def test_no_tokens_append_nothing_but_queries_are_rotated() -> None:
    problem, inputs = prepared("dense", 8)
    arguments = KvCacheArguments(
        inputs.q, inputs.k, inputs.v, inputs.k_new[:, :0], inputs.v_new[:, :0], inputs.rotary_cos, inputs.rotary_sin,
        inputs.cache_seqlens, inputs.cache_batch_idx,
    )  # fmt: skip
    before = inputs.k.clone()
    q = append_tokens(*prepare_kvcache(arguments, Options(causal=True)))
    assert torch.equal(inputs.k, before)
    assert torch.equal(q, append_tokens(problem, inputs))
