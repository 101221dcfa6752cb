"""How does attention on a CPU use 1 to many threads, beside torch's SDPA?

    python benchmarks/cpu_threads.py
    python benchmarks/cpu_threads.py --threads 1,2 --seconds 0.5

Prefill, many short prompts, decode of one and of 16 sequences with caches of either layout, gradients and linear
attention, by dtype and number of threads. A plain matrix product and a plain sum show how far the machine itself
scales. With the most threads two calls are repeated while another process keeps a core busy.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, heads_first, publish, with_gradients, without_grad
from pages import cpu_threads
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fastattention import fast_attn_func, fast_attn_with_kvcache
from fastattention.cli.bench.linear_peers import LinearWorkload, call_of
from fastattention.cli.bench.timing import median_seconds

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NHEADS, HEADDIM = 16, 128
DECODE_NHEADS, DECODE_NHEADS_K = 32, 8
BUSY_CALLS = ("short prompts", "decode")
MATRIX, SUM_BYTES = 2048, 1 << 28

Calls = dict[str, Callable[[], object]]


def main(
    threads: str = "1,2,4,8,16", dtypes: str = ",".join(DTYPES), seconds: float = 1.5, output: Path = RESULTS
) -> None:
    """Write cpu_threads.json into `output`.

    seconds: for each call, dtype and number of threads
    """
    counts = [int(count) for count in threads.split(",")]
    rows, busy = [], []
    for dtype in dtypes.split(","):
        for call, calls in workloads(DTYPES[dtype]):
            for count in counts:
                torch.set_num_threads(count)
                rows.append({"dtype": dtype, "call": call, "threads": count, "seconds": median_seconds(calls, seconds)})
            if call in BUSY_CALLS:
                with a_busy_core():
                    found = median_seconds(calls, seconds)
                busy.append({"dtype": dtype, "call": call, "threads": counts[-1], "seconds": found})
    limits = []
    for count in counts:
        torch.set_num_threads(count)
        limits.append({"threads": count, "seconds": median_seconds(plain_work(), seconds)})
    figures = {"rows": rows, "busy": busy, "limits": limits}
    publish(output / "cpu_threads.json", figures, *cpu_threads.tables(figures))


def workloads(dtype: torch.dtype) -> Iterator[tuple[str, Calls]]:
    """What is measured: the name of a call, and ours and SDPA's."""
    yield "prompt of 2K", attention(1, 2048, dtype, causal=True)
    yield "short prompts", attention(8, 512, dtype, causal=False)
    yield "gradients of 1K", gradients(1, 1024, dtype)
    yield "decode", decode(1, 32768, dtype)
    yield "decode of 16", decode(16, 4096, dtype)
    if dtype != torch.float16:
        yield "linear attention of 2K", linear(2048, dtype)


def random(dtype: torch.dtype, *shape: int) -> Tensor:
    """Standard normal values."""
    return torch.randn(shape, device="cpu", dtype=torch.float32).to(dtype)


def attention(batch_size: int, seqlen: int, dtype: torch.dtype, causal: bool) -> Calls:
    """Prompts of equal length."""
    q, k, v = (random(dtype, batch_size, seqlen, NHEADS, HEADDIM) for _ in range(3))
    return {who: without_grad(forward, q, k, v) for who, forward in forwards(causal).items()}


def gradients(batch_size: int, seqlen: int, dtype: torch.dtype) -> Calls:
    """A causal forward and its gradients."""
    q, k, v, grad = (random(dtype, batch_size, seqlen, NHEADS, HEADDIM) for _ in range(4))
    return {who: with_gradients(forward, q, k, v, grad=grad) for who, forward in forwards(causal=True).items()}


def forwards(causal: bool) -> dict[str, Callable[..., Any]]:
    """Ours and SDPA's, of tensors with tokens before heads."""
    ours: Callable[..., Any] = fast_attn_func
    sdpa = functools.partial(scaled_dot_product_attention, is_causal=causal)
    return {
        "ours": functools.partial(ours, causal=causal, backend="cpu"),
        "SDPA": functools.partial(heads_first, sdpa),
    }


def decode(batch_size: int, keys: int, dtype: torch.dtype) -> Calls:
    """One query of each sequence, with caches of both layouts."""
    q = random(dtype, batch_size, 1, DECODE_NHEADS, HEADDIM)
    k, v = (random(dtype, batch_size, DECODE_NHEADS_K, keys, HEADDIM) for _ in range(2))
    lengths = torch.full((batch_size,), keys, dtype=torch.int32, device="cpu")
    call_cache: Callable[..., Any] = fast_attn_with_kvcache
    ours = functools.partial(call_cache, cache_seqlens=lengths, backend="cpu")
    tokens_first = [x.transpose(1, 2).contiguous() for x in (k, v)]
    sdpa = functools.partial(scaled_dot_product_attention, enable_gqa=True)
    return {
        "ours": without_grad(ours, q, k.transpose(1, 2), v.transpose(1, 2)),
        "ours, tokens first": without_grad(ours, q, *tokens_first),
        "SDPA": without_grad(sdpa, q.transpose(1, 2), k, v),
    }


def linear(seqlen: int, dtype: torch.dtype) -> Calls:
    """The gated delta rule of a prompt; torch has no such function."""
    workload = LinearWorkload("gated delta rule", 1, seqlen, str(dtype).removeprefix("torch."), trains=False)
    return {"ours": torch.no_grad()(call_of("fastattention", workload, "cpu"))}


def plain_work() -> Calls:
    """A matrix product and a sum, of torch: what the machine gives to more threads."""
    a, b = (random(torch.float32, MATRIX, MATRIX) for _ in range(2))
    memory = torch.zeros(SUM_BYTES // 4, device="cpu", dtype=torch.float32)
    return {"matrix product": lambda: a @ b, "sum": memory.sum}


@contextmanager
def a_busy_core() -> Iterator[None]:
    """Another process computes without a pause meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    typer.run(main)
