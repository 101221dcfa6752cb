"""What does a quantized cache cost in accuracy, and what does it gain in time?

    python benchmarks/quantized_cache.py

Accuracy: errors of out against float64 on the values before they are stored, for caches in int8, float8, float16 and
bfloat16. q is float32, so that nothing else is rounded. Inputs are

- tensors of the demo model, layer by layer: queries, keys after rotary embedding and values of a source file;
- normal values, in which four channels of the keys, or of the values, are 20 to 50 times the others, as in language
  models. Queries are as much smaller where keys are larger, so each channel contributes alike to the scores. For values
  with large channels, the error of the other channels is also given by itself.

Arithmetic: errors of a decode on backend cpu against float64 on the same stored values, by dtype of q.

Time: one query against a long cache, bfloat16, float8 and int8 in turns, stored heads first and tokens first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from demo_model import DemoModel, read_text
from harness import RESULTS, publish
from pages import quantized_caches
from torch import Tensor

from fastattention import fast_attn_func, fast_attn_with_kvcache
from fastattention.attention.reference import reference_attention
from fastattention.attention.validation import KvCacheArguments, Options, prepare_dense, prepare_kvcache
from fastattention.cli.bench.timing import interleaved
from fastattention.cli.bench.workload import DTYPES
from fastattention.quantized import quantize

STORED = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "float16": torch.float16, "bfloat16": torch.bfloat16}
QUERIES = 256  # the last ones of a sequence
OUTLIERS = torch.tensor([20.0, 30.0, 40.0, 50.0])
HEADS_FIRST = (True, False)


class Numbers(NamedTuple):
    """q (1, queries, nheads, headdim), k and v (1, seqlen, nheads_k, headdim) in float32: the last queries, causal."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    ordinary: Tensor | None = None  # bool (nheads, headdim): where out is compared; everywhere if None


def main(tokens: int = 8192, keys: int = 16384, seconds: float = 10.0, output: Path = RESULTS) -> None:
    """Use up to `tokens` of text; spend about `seconds` on each timing; write quantized_cache.json into `output`."""
    errors = [
        {"numbers": numbers.name, "cache": cache, **cache_error(numbers, cache)}
        for numbers in (*model_numbers(tokens), *outlier_numbers(min(tokens, 4096)))
        for cache in STORED
    ]
    arithmetic = [arithmetic_error(dtype, cache) for dtype in DTYPES for cache in ("as q", "int8", "float8")]
    times = [
        decode_times(seqlen, nheads, nheads_k, heads_first, seconds)
        for seqlen, nheads, nheads_k in ((keys, 32, 32), (8 * keys, 32, 4))
        for heads_first in HEADS_FIRST
    ]
    figures = {"errors": errors, "arithmetic": arithmetic, "times": times}
    publish(output / "quantized_cache.json", figures, *quantized_caches.sections(figures))


def model_numbers(tokens: int) -> Iterator[Numbers]:
    """Queries, keys and values of every layer of the demo model when it reads a source file."""
    model = DemoModel()
    model.read(read_text(tokens), lambda q, k, v: fast_attn_func(q, k, v, causal=True))
    for index, (q, k, v) in enumerate(model.layers):
        yield Numbers(f"demo model, layer {index}", q[:, -QUERIES:], k, v)


def outlier_numbers(seqlen: int) -> Iterator[Numbers]:
    """8 query heads on 2 key heads of 128; the large channels differ from head to head."""
    for name in ("no outliers", "outliers in keys", "outliers in values"):
        generator = torch.Generator().manual_seed(0)
        ordinary = torch.ones(8, 128, dtype=torch.bool)
        q = torch.randn(1, min(QUERIES, seqlen), 8, 128, generator=generator)
        k, v = (torch.randn(1, seqlen, 2, 128, generator=generator) for _ in range(2))
        for head in range(2):
            channels = torch.randperm(128, generator=generator)[: len(OUTLIERS)]
            query_heads = torch.arange(4 * head, 4 * head + 4).unsqueeze(1)
            if name == "outliers in keys":
                k[:, :, head, channels] *= OUTLIERS
                q[:, :, query_heads, channels] /= OUTLIERS
            if name == "outliers in values":
                v[:, :, head, channels] *= OUTLIERS
                ordinary[query_heads, channels] = False
        yield Numbers(name, q, k, v)
        if not ordinary.all():
            yield Numbers(f"{name}, other channels", q, k, v, ordinary)


def cache_error(numbers: Numbers, cache: str) -> dict[str, float]:
    """The largest error of out, its root mean square, and the root mean square of out."""
    q, k, v = numbers.q, numbers.k, numbers.v
    exact = reference_attention(*prepare_dense(q, k, v, Options(causal=True))).out
    out = fast_attn_with_kvcache(q, **stored(k, v, cache), causal=True)
    if numbers.ordinary is not None:
        out, exact = out[:, :, numbers.ordinary], exact[:, :, numbers.ordinary]
    error = out.double() - exact
    return {"max": float(error.abs().max()), "rms": rms(error), "rms_out": rms(exact)}


def stored(k: Tensor, v: Tensor, cache: str) -> dict[str, Any]:
    """The arguments for k and v stored as `cache`: dequantized to float32 where they have no scales."""
    dtype = STORED[cache]
    if cache in ("float16", "bfloat16"):
        return {"k_cache": k.to(dtype).float(), "v_cache": v.to(dtype).float()}
    (k, k_scale), (v, v_scale) = quantize(k, dtype), quantize(v, dtype)
    return {"k_cache": k, "v_cache": v, "k_scale": k_scale, "v_scale": v_scale}


def arithmetic_error(dtype: str, cache: str) -> dict[str, Any]:
    """Errors of a decode of 4096 standard normal keys, 32 heads on 8 of 128, against its own stored values."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, 32, 128, generator=generator).to(DTYPES[dtype])
    k, v = (torch.randn(1, 4096, 8, 128, generator=generator) for _ in range(2))
    arguments = {"k_cache": k.to(q.dtype), "v_cache": v.to(q.dtype)} if cache == "as q" else stored(k, v, cache)
    exact = reference_attention(*prepare_kvcache(KvCacheArguments(q, **arguments), Options())).out
    error = fast_attn_with_kvcache(q, **arguments, backend="cpu").double() - exact
    return {"dtype": dtype, "cache": cache, "max": float(error.abs().max()), "rms": rms(error)}


def rms(x: Tensor) -> float:
    """Root mean square."""
    return float(x.square().mean().sqrt())


def decode_times(seqlen: int, nheads: int, nheads_k: int, heads_first: bool, seconds: float) -> dict[str, Any]:
    """Seconds of one bfloat16 query of headdim 128 against each kind of cache, on backend cpu."""
    kinds = ("bfloat16", "float8", "int8")
    calls = {cache: decode_call(seqlen, nheads, nheads_k, heads_first, cache) for cache in kinds}
    for call in calls.values():
        call()
    timings = interleaved(calls, seconds)
    heads = f"{nheads}:{nheads_k}" if nheads != nheads_k else str(nheads)
    return {
        "call": f"{seqlen} keys, {heads} heads of 128, {'heads' if heads_first else 'tokens'} first",
        "cache_bytes": {cache: 2 * seqlen * nheads_k * 128 * STORED[cache].itemsize for cache in calls},
        "seconds": {cache: timing.median for cache, timing in timings.items()},
        "lower_quartile": {cache: timing.lower_quartile for cache, timing in timings.items()},
        "rounds": {cache: timing.calls for cache, timing in timings.items()},
    }


def decode_call(seqlen: int, nheads: int, nheads_k: int, heads_first: bool, cache: str) -> Callable[[], Tensor]:
    """A decode against a cache of its own."""
    shape = (1, nheads_k, seqlen, 128) if heads_first else (1, seqlen, nheads_k, 128)
    arguments: dict[str, Any] = {}
    for name in ("k", "v"):
        numbers, scale = torch.randn(shape), None
        numbers, scale = quantize(numbers, STORED[cache]) if cache != "bfloat16" else (numbers.bfloat16(), None)
        arguments[f"{name}_cache"] = numbers.transpose(1, 2) if heads_first else numbers
        if scale is not None:
            arguments[f"{name}_scale"] = scale.transpose(1, 2) if heads_first else scale
    q = torch.randn(1, 1, nheads, 128).bfloat16()
    return lambda: fast_attn_with_kvcache(q, **arguments, backend="cpu")


if __name__ == "__main__":
    typer.run(main)
