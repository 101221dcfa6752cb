"""How fast are head dimensions of 512, and latent attention, on a GPU?

    python benchmarks/gpu_headdim.py

Prefill and gradients of 16384 tokens in all at headdim 512, compared with the kernels of torch that serve it. Decode at
headdim 512, and latent decode: keys of 576 whose first 512 columns are the values, 16 and 128 query heads on one key
head, a dense cache and pages of 64. bfloat16; all but gradients are replayed from CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from headdim import HEADDIM, HEADDIM_V, PAGE_BLOCK_SIZE
from pages import wide_heads
from torch import Tensor
from torch.nn.attention import SDPBackend

from fastattention import fast_attn_func, fast_attn_with_kvcache
from fastattention.cli.bench.gpu import heads_first, sdpa
from fastattention.cli.bench.gpu_backward import Backward
from fastattention.cli.bench.gpu_decode import CapturedCalls, copy_bandwidth, graph_microseconds
from fastattention.cli.bench.timing import interleaved_on_device

WIDE = 512
TOKENS, NHEADS, SEQLENS = 16384, 4, (1024, 4096, 16384)
PEERS = {"SDPA efficient": SDPBackend.EFFICIENT_ATTENTION, "SDPA math": SDPBackend.MATH}
Call = Callable[[], object]


def main(rounds: int = 9, output: Path = RESULTS) -> None:
    """Measure the current GPU; write gpu_headdim.json into `output`."""
    copy_gbps = copy_bandwidth(rounds)
    with torch.inference_mode():
        rows = [prefill(seqlen, causal, rounds) for seqlen in SEQLENS for causal in (False, True)]
        rows += [decode(batch_size, keys, rounds) for batch_size, keys in ((1, 131072), (8, 32768))]
        rows += [
            latent(batch_size, keys, nheads, rounds)
            for nheads in (16, 128)
            for batch_size, keys in ((1, 131072), (32, 8192), (132, 2048))
        ]
    rows += [gradients(seqlen, causal, rounds) for seqlen in SEQLENS for causal in (False, True)]
    figures = {"copy_gbps": copy_gbps, "rows": rows}
    blocks = wide_heads.prefill(figures), wide_heads.gradients(figures), wide_heads.decode(figures)
    publish(output / "gpu_headdim.json", figures, *blocks)


def random(*shape: int) -> Tensor:
    """Standard normal values, in bfloat16, on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def prefill(seqlen: int, causal: bool, rounds: int) -> dict[str, Any]:
    """Prefill with as many query heads as key heads; causal counts half."""
    shape = (TOKENS // seqlen, seqlen, NHEADS, WIDE)
    q, k, v = (random(*shape) for _ in range(3))
    calls: dict[str, Call] = {"fastattention": lambda: fast_attn_func(q, k, v, causal=causal, backend="cuda")}
    for name, peer in PEERS.items():
        calls[name] = partial(sdpa, peer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal)
    flops = 4.0 * TOKENS * seqlen * NHEADS * WIDE / (2 if causal else 1)
    return {"kind": "prefill", "seqlen": seqlen, "causal": causal, **timed(calls, rounds, flops, 0.0)}


def gradients(seqlen: int, causal: bool, rounds: int) -> dict[str, Any]:
    """The backward alone, in any order and deterministic; 2.5 times the operations of the forward."""
    q, k, v, grad = (random(TOKENS // seqlen, seqlen, NHEADS, WIDE) for _ in range(4))
    attend: Callable[..., Any] = fast_attn_func
    calls: dict[str, Call] = {}
    for name, deterministic in (("fastattention", False), ("fastattention deterministic", True)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, causal=causal, deterministic=deterministic, backend="cuda")
        calls[name] = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
    for name, peer in PEERS.items():
        calls[name] = Backward(peer, [heads_first(x).requires_grad_() for x in (q, k, v)], heads_first(grad), causal)
    flops = 2.5 * 4.0 * TOKENS * seqlen * NHEADS * WIDE / (2 if causal else 1)
    seconds = interleaved_on_device(calls, rounds)
    microseconds = {name: 1e6 * taken for name, taken in seconds.items()}
    return {"kind": "gradients", "seqlen": seqlen, "causal": causal, "microseconds": microseconds, "flops": flops}


def decode(batch_size: int, keys: int, rounds: int) -> dict[str, Any]:
    """Decode of one query of 16 heads on 2."""
    q = random(batch_size, 1, 16, WIDE)
    k, v = (random(batch_size, keys, 2, WIDE) for _ in range(2))
    seqlens = torch.full((batch_size,), keys, dtype=torch.int32, device="cuda")
    calls = {"dense": lambda: fast_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, backend="cuda")}
    flops = 4.0 * batch_size * keys * 16 * WIDE
    times = timed(calls, rounds, flops, float(k.nbytes + v.nbytes))
    return {"kind": "decode", "batch_size": batch_size, "nheads": 16, "keys": keys, **times}


def latent(batch_size: int, keys: int, nheads: int, rounds: int) -> dict[str, Any]:
    """Latent decode of one query of `nheads` heads on one key head."""
    q = random(batch_size, 1, nheads, HEADDIM)
    cache = random(batch_size, keys, 1, HEADDIM)
    pages = cache.view(-1, PAGE_BLOCK_SIZE, 1, HEADDIM)
    common: dict[str, Any] = {
        "cache_seqlens": torch.full((batch_size,), keys, dtype=torch.int32, device="cuda"),
        "backend": "cuda",
    }
    table = torch.randperm(len(pages), device="cuda").int().view(batch_size, -1)
    calls = {
        "dense": lambda: fast_attn_with_kvcache(q, cache, cache[..., :HEADDIM_V], **common),
        "pages of 64": lambda: fast_attn_with_kvcache(q, pages, pages[..., :HEADDIM_V], block_table=table, **common),
    }
    flops = 2.0 * batch_size * keys * nheads * (HEADDIM + HEADDIM_V)
    times = timed(calls, rounds, flops, float(cache.nbytes))
    return {"kind": "latent decode", "batch_size": batch_size, "nheads": nheads, "keys": keys, **times}


def timed(calls: Mapping[str, Call], rounds: int, flops: float, bytes_read: float) -> dict[str, Any]:
    """Median microseconds of each call, five to a graph."""
    microseconds = graph_microseconds({name: CapturedCalls([call] * 5) for name, call in calls.items()}, rounds)
    torch.cuda.empty_cache()
    return {"microseconds": microseconds, "flops": flops, "bytes": bytes_read}


if __name__ == "__main__":
    typer.run(main)
