"""Do heads of 512 run as fast as heads of 256, and latent attention as fast as memory or arithmetic allow?

    python benchmarks/headdim.py

Prefill and decode at headdim 512 against 256, with as many elements in all: 8 heads of 256, 4 of 512. Latent decode:
keys of 576 whose first 512 columns are the values, 16 and 128 query heads on one key head, a dense cache and pages of
64. Each takes turns with loops at the limits of the processor: multiply-adds in its dtype, and reads of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from harness import RESULTS, publish
from pages import wide_heads
from torch import Tensor

from fastattention import fast_attn_func, fast_attn_with_kvcache
from fastattention.cli.bench.peaks import limit_loop
from fastattention.cli.bench.timing import interleaved
from fastattention.cli.bench.workload import DTYPES, Limit

ELEMENTS = 2048  # elements of a token in all heads
HEADDIM, HEADDIM_V = 576, 512  # of latent attention
PAGE_BLOCK_SIZE = 64


class Work(NamedTuple):
    """A call, the operations of its two products, and the bytes of keys and values it reads."""

    call: Callable[[], Tensor]
    flops: float
    bytes: float


def main(seqlen: int = 4096, keys: int = 32768, seconds: float = 10.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each row; write headdim.json into `output`."""
    with torch.inference_mode():
        rows = [
            measure(f"prefill, {seqlen} tokens{', causal' * causal}", dtype, seconds, {
                f"{headdim}": prefill(dtype, headdim, seqlen, causal) for headdim in (256, 512)
            })
            for dtype in DTYPES
            for causal in (False, True)
        ]  # fmt: skip
        rows += [
            measure(f"decode, {keys} keys, {group} on 1", dtype, seconds, {
                f"{headdim}": decode(dtype, headdim, keys, group) for headdim in (256, 512)
            })
            for dtype in DTYPES
            for group in (1, 8)
        ]  # fmt: skip
        rows += [
            measure(f"latent decode, {keys} keys, {nheads} heads", dtype, seconds, {
                place: latent(dtype, keys, nheads, place) for place in ("dense", "pages")
            })
            for dtype in DTYPES
            for nheads in (16, 128)
        ]  # fmt: skip
    figures = {"rows": rows}
    publish(output / "headdim.json", figures, wide_heads.on_cpu(figures))


def prefill(dtype: str, headdim: int, seqlen: int, causal: bool) -> Work:
    """A whole prompt, as many query heads as key heads; causal counts half."""
    heads = ELEMENTS // headdim
    q, k, v = (torch.randn(1, seqlen, heads, headdim).to(DTYPES[dtype]) for _ in range(3))
    pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen * seqlen
    return Work(
        lambda: fast_attn_func(q, k, v, causal=causal, backend="cpu"), 4.0 * heads * headdim * pairs, 2.0 * k.nbytes
    )


def decode(dtype: str, headdim: int, keys: int, group: int) -> Work:
    """One query against a cache stored heads first."""
    heads = ELEMENTS // headdim // 2
    k, v = (torch.randn(1, heads, keys, headdim).to(DTYPES[dtype]).transpose(1, 2) for _ in range(2))
    q = torch.randn(1, 1, heads * group, headdim).to(k.dtype)
    return Work(
        lambda: fast_attn_with_kvcache(q, k, v, backend="cpu"), 4.0 * heads * group * headdim * keys, 2.0 * k.nbytes
    )


def latent(dtype: str, keys: int, nheads: int, place: str) -> Work:
    """One query of `nheads` heads against keys whose first columns are the values; `keys` are whole pages."""
    size = keys if place == "dense" else PAGE_BLOCK_SIZE
    cache = torch.randn(keys // size, size, 1, HEADDIM).to(DTYPES[dtype])
    table = None if place == "dense" else torch.randperm(keys // size).to(torch.int32).unsqueeze(0)
    q = torch.randn(1, 1, nheads, HEADDIM).to(cache.dtype)
    where: dict[str, Any] = {
        "cache_seqlens": torch.tensor([keys], dtype=torch.int32),
        "block_table": table,
        "backend": "cpu",
    }
    return Work(
        lambda: fast_attn_with_kvcache(q, cache, cache[..., :HEADDIM_V], **where),
        2.0 * nheads * (HEADDIM + HEADDIM_V) * keys,
        float(cache.nbytes),
    )


def measure(name: str, dtype: str, seconds: float, works: dict[str, Work]) -> dict[str, Any]:
    """Medians of `works` and of the loops at the limits, in turns."""
    limits: tuple[Limit, ...] = ("bf16_dot" if dtype == "bfloat16" else "fma", "dram_read")
    loops = {limit: loop for limit in limits if (loop := limit_loop(limit) or limit_loop("fma")) is not None}
    calls: dict[str, Callable[[], object]] = {label: work.call for label, work in works.items()}
    calls |= {str(limit): loop for limit, loop in loops.items()}
    amounts = {limit: loop() for limit, loop in loops.items()}
    for work in works.values():
        work.call()
    timings = interleaved(calls, seconds)
    return {
        "call": name,
        "dtype": dtype,
        "limits": {limit: amounts[limit] / timings[limit].median for limit in loops},
        "works": {
            label: {
                "seconds": timings[label].median,
                "flops": work.flops,
                "bytes": work.bytes,
                "rounds": timings[label].calls,
            }
            for label, work in works.items()
        },
    }


if __name__ == "__main__":
    typer.run(main)
