"""How fast are the parts of latent attention, and a layer of DeepSeek's size with them?

    python benchmarks/latents.py             # on the GPU
    python benchmarks/latents.py --device cpu

- The indexer of DeepSeek-V3.2 (64 heads of 128, 2,048 keys of each query), beside torch's product of queries and keys
  alone, which is computed a piece at a time.
- Attention of 128 heads to 2,048 selected latents of each query, beside attention to latents that lie one after another
  in a cache of 2,048.
- A token of a few layers of DeepSeek V3 and V3.2 with random weights, after a random cache, by fast_attention, sdpa and
  eager; and the memory that it takes beside weights and cache.

Calls take turns; figures are medians. On a GPU, calls of functions are replayed from CUDA graphs, as the time of Python
would hide that of a few queries. Models run as they are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import latents
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV32Config, DynamicCache

from fastattention import fast_attn_latent_func, fast_attn_with_kvcache
from fastattention.cli.bench.timing import in_turns, time_on_device
from fastattention.indexer import fast_indexer_func
from fastattention.integrations.transformers import NAME
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

TOPK, INDEXER_HEADS, INDEXER_HEADDIM, HEADS, RANK, ROPE = 2048, 64, 128, 128, 512, 64
SCALE = (128 + 64) ** -0.5
PRODUCTS = 1 << 30  # elements that torch's product writes at a time
# (sequences, queries of each, keys of each)
CASES = {
    "cuda": [
        (1, 1, 32768), (1, 1, 131072), (16, 1, 32768), (64, 1, 32768), (64, 1, 131072), (1, 512, 131072),
        (1, 4096, 131072),
    ],
    "cpu": [(1, 1, 16384), (1, 1, 65536), (1, 16, 65536), (1, 256, 8192)],
}  # fmt: skip
LAYERS = {"cuda": 2, "cpu": 1}
KEYS: dict[str, dict[str, tuple[int, ...]]] = {"cuda": dict.fromkeys((NAME, "sdpa", "eager"), (8192, 65536, 131072))}
KEYS["cpu"] = {NAME: (16384, 65536), "sdpa": (16384,), "eager": (16384,)}  # others do not fit 24 GB
MODELS = {"DeepSeek V3": DeepseekV3Config, "DeepSeek V3.2": DeepseekV32Config}
CALLS = {"cuda": 5, "cpu": 1}


def timed(calls: Mapping[str, Callable[[], object]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each call, in turns."""
    if device == "cuda":
        calls = {name: captured(call) for name, call in calls.items()}
    turns = {name: partial(time_on_device, call, CALLS[device], device) for name, call in calls.items()}
    return {name: median(found) for name, found in in_turns(turns, rounds, warm_up=1).items()}


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a graph of a call."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], object] = graph.replay
    return replay


def indexer(case: tuple[int, int, int], dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    """The indexer, and the product alone."""
    sequences, queries, keys = case
    q = torch.randn(sequences, queries, INDEXER_HEADS, INDEXER_HEADDIM, device=device, dtype=dtype)
    k = torch.randn(sequences, keys, INDEXER_HEADDIM, device=device, dtype=dtype)
    weights = torch.randn(sequences, queries, INDEXER_HEADS, device=device, dtype=torch.float32)
    rows, step = q.flatten(1, 2), max(PRODUCTS // (sequences * keys * INDEXER_HEADS), 1) * INDEXER_HEADS
    out = torch.empty(sequences, min(step, rows.shape[1]), keys, device=device, dtype=dtype)

    def product() -> None:
        for first in range(0, rows.shape[1], step):
            part = rows[:, first : first + step]
            torch.bmm(part, k.mT, out=out[:, : part.shape[1]])

    calls = {"fastattention": lambda: fast_indexer_func(q, k, weights, TOPK), "product": product}
    return _record(case, dtype) | {"seconds": timed(calls, device, rounds)}


def selected(case: tuple[int, int, int], dtype: torch.dtype, device: str, rounds: int) -> dict[str, Any]:
    """Attention to selected latents, and to a cache of as many."""
    sequences, queries, keys = case
    q = torch.randn(sequences, queries, HEADS, RANK + ROPE, device=device, dtype=dtype)
    cache = torch.randn(sequences, keys, RANK + ROPE, device=device, dtype=dtype)
    drawn = [torch.randperm(keys, device=device)[:TOPK].sort().values for _ in range(64)]
    chosen = torch.stack(drawn).to(torch.int32).repeat(-(-sequences * queries // 64), 1)
    indices = chosen[: sequences * queries].view(sequences, queries, TOPK)
    near = torch.randn(sequences * queries if queries == 1 else 1, TOPK, 1, RANK + ROPE, device=device, dtype=dtype)
    tokens = q.view(sequences * queries, 1, HEADS, RANK + ROPE) if queries == 1 else q
    calls = {
        "fastattention": lambda: fast_attn_latent_func(q, cache, RANK, SCALE, indices=indices),
        "one after another": lambda: fast_attn_with_kvcache(tokens, near, near[..., :RANK], softmax_scale=SCALE),
    }
    return _record(case, dtype) | {"seconds": timed(calls, device, rounds)}


def _record(case: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    return dict(zip(("sequences", "queries", "keys"), case, strict=True)) | {"dtype": str(dtype).removeprefix("torch.")}


def layers(name: str, implementation: str, device: str, rounds: int) -> list[dict[str, Any]]:
    """A token after caches of several lengths, by an implementation."""
    count = LAYERS[device]
    config = MODELS[name](
        num_hidden_layers=count, first_k_dense_replace=count, vocab_size=1000, intermediate_size=2048,
        max_position_embeddings=1 << 18,
    )  # fmt: skip
    with torch.device(device):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation=implementation, dtype=torch.bfloat16).eval()
    found = []
    for keys in KEYS[device][implementation]:
        cache = _filled(config, keys, device)
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)

        def step(cache: Any = cache, token: Tensor = token) -> None:
            model(token, **{CACHE_ARGUMENT: cache})
            cache.crop(-1)

        step()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            memory = torch.cuda.max_memory_allocated() - before
        seconds = median(time_on_device(step, 1, device) for _ in range(rounds))
        found.append({"model": name, "implementation": implementation, "keys": keys, "seconds": seconds})
        found[-1] |= {"bytes": memory} if device == "cuda" else {}
    return found


def _filled(config: Any, keys: int, device: str) -> Any:
    cache: Any = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        parts = (torch.randn(1, 1, keys, size, device=device, dtype=torch.bfloat16) for size in (RANK, ROPE))
        cache.update(*parts, layer)
        if hasattr(config, "index_topk"):
            cache.update_indexer(torch.randn(1, keys, INDEXER_HEADDIM, device=device, dtype=torch.bfloat16), layer)
    return cache


@torch.inference_mode()
def main(device: str = "cuda", rounds: int = 9, output: Path = RESULTS) -> None:
    """Measure this machine; write latents_gpu.json or latents_cpu.json into `output`."""
    dtypes = [torch.bfloat16] if device == "cuda" else [torch.bfloat16, torch.float32]
    figures: dict[str, Any] = {
        part.__name__: [part(case, dtype, device, rounds) for dtype in dtypes for case in CASES[device]]
        for part in (indexer, selected)
    }
    figures["num_layers"], figures["layers"] = LAYERS[device], []
    for name in MODELS:
        for implementation in KEYS[device]:
            gc.collect()
            figures["layers"] += layers(name, implementation, device, rounds)
    publish(output / f"latents_{'gpu' if device == 'cuda' else 'cpu'}.json", figures, *latents.tables(figures))


if __name__ == "__main__":
    typer.run(main)
