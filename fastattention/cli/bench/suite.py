"""The questions of `fastattention bench`: lists of workloads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastattention.cli.bench.workload import DTYPES, BenchWorkload

# Uneven lengths, as of requests: 3584 real tokens, where padding would compute 16384.
VARLEN_FRACTIONS = (1.0, 0.25, 0.1875, 0.125, 0.09375, 0.046875, 0.03125, 0.015625)


def prefill(seqlen: int = 4096) -> list[BenchWorkload]:
    """A whole prompt at once: hidden size 2048 in heads of 64 and of 128, full and causal, in every dtype."""
    return [
        BenchWorkload("prefill", dtype, (seqlen,), (seqlen,), heads, heads, 2048 // heads, causal)
        for dtype in DTYPES
        for heads in (32, 16)
        for causal in (False, True)
    ]


def decode(grouped_keys: int = 131072, keys: int = 16384) -> list[BenchWorkload]:
    """One query against a cache: eight query heads a key head in half precision; as many key heads in every dtype."""
    grouped = [_decode(dtype, grouped_keys, 4) for dtype in ("bfloat16", "float16")]
    ungrouped = [_decode(dtype, keys, 32) for dtype in DTYPES]
    # With 4096 keys in float16 ggml reads at the speed of memory. Where `keys` is that short, it is in the list
    # already.
    return list(dict.fromkeys([*grouped, *ungrouped, _decode("float16", min(keys, 4096), 32)]))


def varlen(longest: int = 2048) -> list[BenchWorkload]:
    """Eight causal sequences of uneven length without padding."""
    seqlens = tuple(max(1, int(longest * fraction)) for fraction in VARLEN_FRACTIONS)
    return [BenchWorkload("packed", dtype, seqlens, seqlens, 16, 16, 64, causal=True) for dtype in DTYPES]


def backward(seqlen: int = 2048, long: int = 8192) -> list[BenchWorkload]:
    """Gradients of q, k and v: hidden size 2048 in heads of 64 and of 128, and one head of a long sequence."""
    many = [replace(one, kind="backward") for one in prefill(seqlen)]
    one = [
        BenchWorkload("backward", dtype, (long,), (long,), 1, 1, 128, causal)
        for dtype in ("float32", "bfloat16")
        for causal in (False, True)
    ]
    return [*many, *one]


def overhead() -> list[BenchWorkload]:
    """Calls with next to no arithmetic, which show the overhead of a call: fast_attn_func, then one with a cache."""
    return [
        BenchWorkload("prefill", "float32", (1,), (1,), 1, 1, 64),
        BenchWorkload("decode", "float32", (1,), (1,), 1, 1, 64),
    ]


QUESTIONS: dict[str, Callable[[], list[BenchWorkload]]] = {
    "prefill": prefill,
    "decode": decode,
    "packed": varlen,
    "backward": backward,
    "overhead": overhead,
}


def full_suite() -> dict[str, list[BenchWorkload]]:
    """Every question at the sizes of the published figures."""
    return {name: question() for name, question in QUESTIONS.items()}


def quick_suite(seqlen: int = 2048) -> dict[str, list[BenchWorkload]]:
    """Every question at small sizes; no workload is longer than 16 * seqlen keys."""
    return {
        "prefill": [one for one in prefill(seqlen) if one.headdim == 128 and one.causal],
        "decode": decode(16 * seqlen, 2 * seqlen)[:4],
        "packed": varlen(seqlen)[:1],
        "backward": [one for one in backward(seqlen // 2, seqlen) if one.headdim == 128 and one.causal],
        "overhead": overhead(),
    }


def _decode(dtype: str, keys: int, nheads_k: int) -> BenchWorkload:
    return BenchWorkload("decode", dtype, (1,), (keys,), 32, nheads_k, 128, causal=True)
