"""Layers alone, with tensors of vLLM's shapes, against attention in float64."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from batches import TARGETS, Batch, make_layer
from fastattention import fast_attn_with_kvcache
from torch import Tensor

from fastattention_vllm.layout import cache_pages, quantize

DECODE = {"query_lens": [1, 1, 1, 1], "seq_lens": [1, 16, 17, 133]}
MIXED = {"query_lens": [1, 37, 5, 1, 64], "seq_lens": [50, 37, 33, 1, 131]}
SHAPES = {"decode": DECODE, "mixed": MIXED}

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    if request.param != "cuda" and find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    return request.param


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPES[request.param]


def make_batch(target: str, shape: dict[str, Any], **changes: Any) -> Batch:
    """A batch, in float16 on a GPU, because the cuda backend does not compute float32 there."""
    own = {"device": "cuda", "dtype": torch.float16} if target == "cuda" else {}
    return Batch(**(own | shape | changes))


def run(target: str, batch: Batch, causal: bool = True, **options: Any) -> Tensor:
    """Writes the batch's tokens and attends. Two rows of query and output are padding."""
    layer = make_layer(target, batch, **options)
    batch.fill(layer.update_cache)
    fused = torch.cat((batch.query, batch.query[:2]), 0).repeat(1, 2, 1)  # rows with a stride, as vLLM's have
    query = fused[:, : batch.num_heads]
    output = torch.full_like(query, 7.0)
    layer.forward(query, batch.kv_cache, batch.common(causal), output)
    assert (output[-2:] == 7.0).all()
    return output[:-2]


def check(target: str, batch: Batch, causal: bool = True, **options: Any) -> None:
    options = {"scale": batch.head_size**-0.5} | options
    compare(run(target, batch, causal, **options), batch, causal=causal, **options)


def compare(out: Tensor, batch: Batch, **expected: Any) -> None:
    """Error against float64 at most twice that of plain torch in the batch's dtype."""
    exact = batch.expected(torch.float64, **expected)
    plain = batch.expected(batch.dtype, **expected)
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max() + 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16", "bfloat16"])
def test_matches_float64(target: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    check(target, make_batch(target, shape, dtype=dtype))


@pytest.mark.parametrize("head_size", [24, 32, 72, 80, 96, 128, 192, 256, 512])
def test_serves_every_head_size(target: str, shape: dict[str, Any], head_size: int) -> None:
    check(target, make_batch(target, shape, head_size=head_size))


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("page_padding", [0, 64], ids=["dense", "padded-pages"])
def test_serves_every_block_size(target: str, shape: dict[str, Any], block_size: int, page_padding: int) -> None:
    check(target, make_batch(target, shape, block_size=block_size, page_padding=page_padding))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(1, 1), (6, 6), (6, 2), (8, 1)], ids=["1", "mha", "gqa", "mqa"]
)
def test_serves_groups_of_heads(target: str, shape: dict[str, Any], num_heads: int, num_kv_heads: int) -> None:
    check(target, make_batch(target, shape, num_heads=num_heads, num_kv_heads=num_kv_heads))


@pytest.mark.parametrize("window", [1, 16, 40, 1000])
def test_window_counts_the_query_itself(target: str, shape: dict[str, Any], window: int) -> None:
    check(target, make_batch(target, shape), sliding_window=window)


def test_blocks_before_the_window_are_not_read(target: str) -> None:
    batch = make_batch(target, {"query_lens": [1, 6], "seq_lens": [120, 133]})
    options = {"scale": 0.2, "sliding_window": 20}
    layer = make_layer(target, batch, **options)
    batch.fill(layer.update_cache)
    for table in batch.tables:  # vLLM frees such blocks and puts the null block in their place
        table[:5] = [0] * 5
    output = torch.empty_like(batch.query)
    layer.forward(batch.query, batch.kv_cache, batch.common(), output)
    compare(output, batch, **options)


def test_softcap(target: str, shape: dict[str, Any]) -> None:
    check(target, make_batch(target, shape), logits_soft_cap=2.5)


def test_alibi(target: str, shape: dict[str, Any]) -> None:
    check(target, make_batch(target, shape), alibi_slopes=[0.5, 0.25, 0.125, 0.06])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_sinks_of_any_dtype(target: str, shape: dict[str, Any], dtype: torch.dtype) -> None:
    batch = make_batch(target, shape)
    check(target, batch, sinks=torch.tensor([3.0, -1.0, 0.5, 5.0], dtype=dtype, device=batch.device))


def test_everything_at_once(target: str, shape: dict[str, Any]) -> None:
    batch = make_batch(target, shape, num_heads=6, num_kv_heads=3, head_size=40, block_size=48)
    sinks = torch.linspace(-1, 3, 6, device=batch.device)
    check(target, batch, scale=0.3, sliding_window=23, logits_soft_cap=4.0, sinks=sinks)


@pytest.mark.parametrize("window", [None, 20], ids=["full", "window"])
def test_no_causal_mask(target: str, window: int | None) -> None:
    check(target, make_batch(target, MIXED), causal=False, sliding_window=window)


def test_padding_writes_nothing_but_slot_0(target: str) -> None:
    batch = make_batch(target, MIXED)
    batch.fill(make_layer(target, batch, scale=1.0).update_cache)
    used = {slot for request in range(len(batch.seq_lens)) for slot in batch.slots(request)}
    tokens = cache_pages(batch.kv_cache, batch.head_size, None).k.flatten(0, 1)
    for slot, token in enumerate(tokens):
        assert token.isnan().all() == (slot not in used)


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8_per_token_head"], ids=["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("block_size", [16, 48])
def test_quantized_cache(
    target: str, shape: dict[str, Any], kv_cache_dtype: str, dtype: torch.dtype, block_size: int
) -> None:
    batch = make_batch(
        target, shape, kv_cache_dtype=kv_cache_dtype, dtype=dtype, block_size=block_size, head_size=40, page_padding=64
    )
    options = {"scale": 0.2, "sliding_window": 30, "logits_soft_cap": 6.0}
    out = run(target, batch, **options)
    stored = torch.int8 if kv_cache_dtype.startswith("int8") else torch.float8_e4m3fn
    keys, values = ([dequantized(x, stored) for x in tensors] for tensors in (batch.keys, batch.values))
    compare(out, batch, keys=keys, values=values, **options)
    # The tolerance is the rounding error of the cache's dtype: half a step of 1/127 or of three bits of mantissa,
    # relative to the values' range.
    unrounded = batch.expected(torch.float64, **options)
    assert (out - unrounded).abs().max() < (0.05 if stored is torch.int8 else 0.2)


def dequantized(x: Tensor, stored: torch.dtype) -> Tensor:
    numbers, scale = quantize(x, stored)
    return numbers.double() * scale.double().unsqueeze(-1)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
def test_quantizes_as_the_append_of_fastattention(stored: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 1, 2, 40, generator=generator) * torch.tensor([1e-30, 1e-3, 1.0, 1e4, 0.0])[:, None, None, None]
    x[1, 0, 1, 7] = torch.inf
    cache, scale = torch.zeros(5, 16, 2, 40).to(stored), torch.zeros(5, 16, 2)
    lengths = torch.zeros(5, dtype=torch.int32)
    fast_attn_with_kvcache(
        torch.zeros_like(x), cache, cache.clone(), x, x, cache_seqlens=lengths, k_scale=scale, v_scale=scale.clone()
    )
    numbers, scales = quantize(x, stored)
    assert torch.equal(numbers.float(), cache[:, :1].float())
    torch.testing.assert_close(scales, scale[:, :1], rtol=0, atol=0, equal_nan=True)
