"""How fast is a token of a whole model on a CPU, where attention and torch's own operations take turns?

    python benchmarks/decode_in_model.py

Transformers' own Llama of the shape of Llama 3.2 1B, with random weights and a random cache that grows as generate's
does (a DynamicCache). It runs torch's attention and ours; ours also without the threads of torch, on workers alone
(docs/internals/architecture.md, "Threads"). All take turns of a few tokens, torch's attention twice in each round: the
ratio of its two medians is the noise. Attention's share of a token is measured in separate turns between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import cpu
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.torch_threads import OpenMp, find_openmp
from fastattention.cli.bench.timing import in_turns, time_on_device
from fastattention.cli.bench.whole_model.build import build, config_of
from fastattention.cli.bench.whole_model.decode import stepper
from fastattention.integrations.transformers import NAME
from fastattention.offload.model_shape import ModelShape

SHAPE = ModelShape(
    "llama-3.2-1b", num_layers=16, nheads=32, nheads_k=8, headdim=64, hidden_size=2048, intermediate_size=8192,
    vocab_size=128256, tied_embeddings=True,
)  # fmt: skip
SDPA, AGAIN, OURS, WORKERS = "sdpa", "sdpa again", NAME, f"{NAME}, its own threads"
ATTENTIONS = {
    SDPA: (SDPA, find_openmp),
    OURS: (NAME, find_openmp),
    AGAIN: (SDPA, find_openmp),
    WORKERS: (NAME, OpenMp),
}  # the implementation of Transformers, and the threads that compute ours


def random_cache(model: Any, keys: int, dtype: torch.dtype) -> DynamicCache:
    """A cache as after a prompt of `keys` tokens."""
    cache = DynamicCache(config=model.config)
    for layer in range(SHAPE.num_layers):
        k, v = (torch.randn(1, SHAPE.nheads_k, keys, SHAPE.headdim).to(dtype) for _ in range(2))
        cache.update(k, v, layer)
    return cache


def seconds_of_a_token(model: Any, cache: Any, tokens: int) -> float:
    """Seconds of a token, among several in a row. The cache is restored afterwards."""
    before = [(layer.keys, layer.values) for layer in cache.layers]
    seconds = time_on_device(stepper(model, torch.zeros(1, 1, dtype=torch.int64), cache), tokens, "cpu")
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        layer.keys, layer.values = keys, values
    return seconds


def measure(model: Any, keys: int, dtype: torch.dtype, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds of a token, and of all attention calls in it, by each attention: medians of rounds in turns."""
    cache = random_cache(model, keys, dtype)

    def turn(name: str) -> tuple[float, float]:
        implementation, threads = ATTENTIONS[name]
        model.set_attn_implementation(implementation)
        load_library().set_omp_team(threads())
        seconds = seconds_of_a_token(model, cache, tokens)
        with timed(implementation) as calls:
            seconds_of_a_token(model, cache, tokens)
        return seconds, sum(calls) / tokens

    found = in_turns({name: partial(turn, name) for name in ATTENTIONS}, rounds, warm_up=1)
    return {
        what: {name: median(turn[index] for turn in turns) for name, turns in found.items()}
        for index, what in enumerate(("seconds", "attention_seconds"))
    }


@contextmanager
def timed(implementation: str) -> Iterator[list[float]]:
    """Collects the seconds of every call of a registered attention function."""
    function, seconds = ALL_ATTENTION_FUNCTIONS[implementation], []

    def call(*args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*args, **options)
        seconds.append(time.perf_counter() - start)
        return result

    ALL_ATTENTION_FUNCTIONS.register(implementation, call)
    try:
        yield seconds
    finally:
        ALL_ATTENTION_FUNCTIONS.register(implementation, function)


@torch.inference_mode()
def main(
    keys: str = "128,512,2048,4096,16384", dtypes: str = "bfloat16,float32", rounds: int = 9, tokens: int = 4,
    output: Path = RESULTS,
) -> None:  # fmt: skip
    """Measure this machine with torch's number of threads; write decode_in_model.json into `output`."""
    rows = []
    for name in dtypes.split(","):
        dtype = getattr(torch, name)
        lengths = [int(length) for length in keys.split(",")]
        model = build(config_of(SHAPE, max(lengths) + tokens), dtype, torch.device("cpu"))
        for length in lengths:
            rows.append({"dtype": name, "keys": length, **measure(model, length, dtype, rounds, tokens)})
    publish(output / "decode_in_model.json", {"tokens": tokens, "rows": rows}, cpu.tokens_of_models(rows))


if __name__ == "__main__":
    typer.run(main)
