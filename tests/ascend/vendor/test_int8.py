"""int8 caches in every kind of scale, and q, k and v in int8, against attention to what the int8 numbers stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance.calls import build_call
from conformance.case import DenseCase, KvCacheCase, Memory
from torch import Tensor

from ascend.vendor.environment import skip_without_torch_npu
from fastattention.backends.ascend.vendor import (
    KeyValueScales,
    forward_int8,
    forward_int8_kv,
    why_not_int8,
    why_not_int8_kv,
)
from fastattention.errors import ArgumentError
from fastattention.problem import AttentionOutput, Inputs, Problem
from fastattention.reference import reference_attention

skip_without_torch_npu()

CHANNEL, TOKEN, TOKEN_HEAD = KeyValueScales


def int8_cache(case: KvCacheCase, scales: KeyValueScales, dtype: torch.dtype) -> tuple[Problem, Inputs, list[Tensor]]:
    """The call of `case` with random int8 in the places of its caches, where they are not NaN, and scales for them."""
    problem, inputs = build_call(case, dtype).prepare()
    generator = torch.Generator().manual_seed(5)
    caches, factors = [], []
    for cache in (inputs.k, inputs.v):
        numbers = torch.randint(-127, 128, cache.shape, generator=generator, dtype=torch.int8)
        caches.append(cache.nan_to_num(0.0).to(torch.int8).copy_(numbers))  # keeps the strides
        axes = {CHANNEL: cache.shape[2:], TOKEN: cache.shape[:2], TOKEN_HEAD: cache.shape[:3]}[scales]
        factor = (0.5 + torch.rand(axes, generator=generator)) / 64
        factors.append(factor.to(dtype) if scales is CHANNEL else factor)
    return problem, inputs._replace(k=caches[0], v=caches[1]), factors


def dequantised(numbers: Tensor, scale: Tensor, scales: KeyValueScales) -> Tensor:
    if scales is CHANNEL:
        return numbers.double() * scale.double()
    missing = numbers.dim() - scale.dim()
    return numbers.double() * scale.double().reshape(*scale.shape, *[1] * missing)


def expected(problem: Problem, inputs: Inputs, factors: list[Tensor], scales: KeyValueScales) -> AttentionOutput:
    k, v = (dequantised(each, by, scales) for each, by in zip((inputs.k, inputs.v), factors, strict=True))
    return reference_attention(problem, inputs._replace(k=k, v=v))


def assert_close(got: AttentionOutput, wanted: AttentionOutput, dtype: torch.dtype) -> None:
    assert got.out.dtype is dtype
    assert got.lse is not None
    assert wanted.lse is not None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.out.double(), wanted.out, rtol=eps, atol=eps)
    torch.testing.assert_close(got.lse.double(), wanted.lse, rtol=1e-5, atol=1e-5)


def check(case: KvCacheCase, scales: KeyValueScales, dtype: torch.dtype) -> None:
    problem, inputs, factors = int8_cache(case, scales, dtype)
    assert why_not_int8_kv(problem, scales) is None
    got = forward_int8_kv(problem, inputs, *factors, scales)
    assert_close(got, expected(problem, inputs, factors, scales), dtype)


@pytest.mark.parametrize("memory", ["contiguous", "heads_major", "sliced_heads"])
@pytest.mark.parametrize("size", [None, 32, 128], ids=["rows", "pages-32", "pages-128"])
@pytest.mark.parametrize("scales", KeyValueScales, ids=lambda scales: scales.value)
def test_a_decode_on_an_int8_cache_is_right(scales: KeyValueScales, size: int | None, memory: Memory) -> None:
    for window in ((-1, 0), (20, 0)):
        case = KvCacheCase(name="int8", cache_seqlens=(0, 77, 130), nheads=8, headdim=64, page_block_size=size,
                           memory_k=memory, window=window)  # fmt: skip
        check(case, scales, torch.float16)
        check(case, scales, torch.bfloat16)


@pytest.mark.parametrize("memory", ["contiguous", "heads_major", "sliced_heads"])
def test_several_queries_on_an_int8_cache_are_right(memory: Memory) -> None:
    for window in ((-1, -1), (-1, 0), (5, 3)):
        case = KvCacheCase(name="int8", seqlen_q=13, cache_seqlens=(0, 9, 77), nheads=4, headdim=32,
                           memory_k=memory, window=window)  # fmt: skip
        check(case, TOKEN, torch.bfloat16)


@pytest.mark.parametrize(
    ("case", "dtype", "scales", "named"),
    [
        ({"headdim": 48}, torch.float16, TOKEN, "headdim=48"),
        ({"page_block_size": 16}, torch.float16, TOKEN, "page_block_size=16"),
        ({"seqlen_q": 17}, torch.bfloat16, TOKEN, "seqlen_q=17"),
        ({"seqlen_q": 4}, torch.float16, TOKEN, "bfloat16"),
        ({"seqlen_q": 4, "page_block_size": 128}, torch.bfloat16, TOKEN, "block_table"),
        ({"seqlen_q": 4}, torch.bfloat16, CHANNEL, "per channel"),
        ({"seqlen_q": 4}, torch.bfloat16, TOKEN_HEAD, "per token_head"),
        ({"softcap": 2.0}, torch.float16, TOKEN, "softcap=2.0"),
    ],
)
def test_an_int8_cache_that_is_not_served_is_refused(
    case: dict[str, Any], dtype: torch.dtype, scales: KeyValueScales, named: str
) -> None:
    problem, _ = build_call(KvCacheCase(name="int8", cache_seqlens=(40, 50), **case), dtype).prepare()
    assert named in (why_not_int8_kv(problem, scales) or "served")


def test_scales_and_caches_of_another_kind_are_refused() -> None:
    case = KvCacheCase(name="int8", cache_seqlens=(40, 50))
    problem, inputs, (k_scale, v_scale) = int8_cache(case, TOKEN, torch.float16)
    with pytest.raises(ArgumentError, match=r"v_scale must be torch.float32 \(2, 53\).*got torch.float16"):
        forward_int8_kv(problem, inputs, k_scale, v_scale.half(), TOKEN)
    with pytest.raises(ArgumentError, match=r"k_scale must be .*\(2, 32\) for scales per channel"):
        forward_int8_kv(problem, inputs, k_scale, v_scale, CHANNEL)
    with pytest.raises(ArgumentError, match=r"k_cache must be int8, got torch\.float16"):
        forward_int8_kv(problem, inputs._replace(k=inputs.k.half()), k_scale, v_scale, TOKEN)
    padded = inputs._replace(cache_leftpad=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="cache_leftpad"):
        forward_int8_kv(problem, padded, k_scale, v_scale, TOKEN)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 3)], ids=["full", "causal", "window"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(40, 60), (60, 40)], ids=["40x60", "60x40"])
def test_int8_queries_keys_and_values_are_right(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> None:
    case = DenseCase(name="int8", seqlen_q=seqlen_q, seqlen_k=seqlen_k, nheads=4, headdim=64, window=window)
    problem, inputs = build_call(case, torch.float16).prepare()
    generator = torch.Generator().manual_seed(6)
    names = ("q", "k", "v")
    numbers = {
        name: torch.randint(-127, 128, getattr(inputs, name).shape, generator=generator, dtype=torch.int8)
        for name in names
    }
    scales = dict(zip(names, (0.013, 0.009, 0.02), strict=True))
    assert why_not_int8(problem) is None
    got = forward_int8(problem, inputs._replace(**numbers), *scales.values())
    exact = {name: numbers[name].double() * scale for name, scale in scales.items()}
    assert_close(got, reference_attention(problem, inputs._replace(**exact)), torch.float16)


def test_int8_queries_that_are_not_served_are_refused() -> None:
    problem, inputs = build_call(DenseCase(name="int8", seqlen_q=4, seqlen_k=4), torch.float16).prepare()
    assert why_not_int8(problem) is None
    for changed, named in (
        ({"dtype": torch.bfloat16}, "float16"),
        ({"headdim": 48, "headdim_v": 48}, "headdim=48"),
        ({"seqlen_q": 1}, "seqlen_q=1"),
        ({"has_sinks": True}, "sinks"),
    ):
        assert named in (why_not_int8(replace(problem, **changed)) or "served")
    with pytest.raises(ArgumentError, match="q must be int8"):
        forward_int8(problem, inputs, 1.0, 1.0, 1.0)
