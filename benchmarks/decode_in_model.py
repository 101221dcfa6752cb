"""How fast is a token of a whole model on a CPU, where attention and torch's own operations take turns?

    python benchmarks/decode_in_model.py

Transformers' own Llama of the shape of Llama 3.2 1B, with random weights and a random cache that grows as generate's
does (a DynamicCache). It runs torch's attention and ours; ours also without the threads of torch, on workers alone
(docs/internals/architecture.md, "Threads"). All take turns of a few tokens, torch's attention twice in each round: the
ratio of its two medians is the noise. Attention's share of a token is measured in separate turns between them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from rich import box
from rich.table import Table
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.torch_threads import OpenMp, find_openmp
from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.report import in_words
from fastattention.cli.bench.whole_model.build import build, config_of
from fastattention.cli.console import OUTPUT
from fastattention.integrations.transformers import NAME
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from fastattention.offload.model_shape import ModelShape

RESULTS = Path(__file__).parent / "results"
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


def turn(model: Any, cache: Any, tokens: int) -> float:
    """Seconds of a token, among several in a row. The cache is restored afterwards."""
    token, before = torch.zeros(1, 1, dtype=torch.int64), [(layer.keys, layer.values) for layer in cache.layers]
    start = time.perf_counter()
    for _ in range(tokens):
        token = model(token, **{CACHE_ARGUMENT: cache}, use_cache=True).logits[:, -1:].argmax(-1)
    seconds = (time.perf_counter() - start) / tokens
    for layer, (keys, values) in zip(cache.layers, before, strict=True):
        layer.keys, layer.values = keys, values
    return seconds


def measure(model: Any, keys: int, dtype: torch.dtype, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds of a token, and of all attention calls in it, by each attention: medians of rounds in turns."""
    cache = random_cache(model, keys, dtype)
    times: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    shares: dict[str, list[float]] = {name: [] for name in ATTENTIONS}
    for name in itertools.chain.from_iterable([*ATTENTIONS] for _ in range(rounds + 1)):
        implementation, threads = ATTENTIONS[name]
        model.set_attn_implementation(implementation)
        load_library().set_omp_team(threads())
        times[name].append(turn(model, cache, tokens))
        with timed(implementation) as calls:
            turn(model, cache, tokens)
        shares[name].append(sum(calls) / tokens)
    # The first round warms up.
    medians = ({name: median(found[1:]) for name, found in each.items()} for each in (times, shares))
    return dict(zip(("seconds", "attention_seconds"), medians, strict=True))


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


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("dtype, keys", *ATTENTIONS):
        table.add_column(heading, justify="left" if heading == "dtype, keys" else "right")
    for row in rows:
        seconds, shares = row["seconds"], row["attention_seconds"]
        cells = [
            f"{in_words(seconds[name])} ({seconds[SDPA] / seconds[name]:.2f}), {in_words(shares[name])}"
            for name in ATTENTIONS
        ]
        table.add_row(f"{row['dtype']}, {row['keys']}", *cells)
    OUTPUT.print(table)
    OUTPUT.print("a token, in brackets how many times as fast as by sdpa, and the attention in it")


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
    show(rows)
    write_record(output / "decode_in_model.json", {"tokens": tokens, "rows": rows})


if __name__ == "__main__":
    typer.run(main)
