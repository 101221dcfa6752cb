"""How fast is a token of a whole model on a CPU, where attention and torch's own operations take turns?

    python benchmarks/decode_in_model.py
    python benchmarks/decode_in_model.py --hybrid   # a model with linear layers

Transformers' own Llama of the shape of Llama 3.2 1B, with random weights and a random cache that grows as generate's
does (a DynamicCache). It runs torch's attention and ours; ours also without the threads of torch, on workers alone
(docs/internals/architecture.md, "Threads"). All take turns of a few tokens, torch's attention twice in each round: the
ratio of its two medians is the noise. Attention's share of a token is measured in separate turns between them.

The hybrid is of the kind of Granite 4. Beside torch's attention, Transformers' own functions compute its Mamba-2
layers; beside our attention, our functions do. The share of a token is that of these layers' convolutions and states.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import cpu, linear
from transformers import DynamicCache, DynamicLayer, GraniteMoeHybridConfig, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.granitemoehybrid import modeling_granitemoehybrid

from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.torch_threads import OpenMp, find_openmp
from fastattention.cli.bench.timing import in_turns, time_on_device
from fastattention.cli.bench.whole_model.build import build, config_of
from fastattention.cli.bench.whole_model.decode import stepper
from fastattention.integrations.transformers import NAME, serve_linear_attention
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from fastattention.offload.model_shape import ModelShape

SHAPE = ModelShape(
    "llama-3.2-1b", num_layers=16, nheads=32, nheads_k=8, headdim=64, hidden_size=2048, intermediate_size=8192,
    vocab_size=128256, tied_embeddings=True,
)  # fmt: skip
HYBRID: dict[str, Any] = {  # half a billion parameters; four layers of attention, as in Granite 4
    "num_hidden_layers": 32, "hidden_size": 1024, "shared_intermediate_size": 2048, "num_local_experts": 0,
    "layer_types": ["full_attention" if layer in (10, 13, 17, 27) else "linear_attention" for layer in range(32)],
    "num_attention_heads": 16, "num_key_value_heads": 4, "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128,
    "vocab_size": 100352, "tie_word_embeddings": True,
}  # fmt: skip
SDPA, AGAIN, OURS, WORKERS = "sdpa", "sdpa again", NAME, f"{NAME}, its own threads"
ATTENTIONS = {
    SDPA: (SDPA, find_openmp),
    OURS: (NAME, find_openmp),
    AGAIN: (SDPA, find_openmp),
    WORKERS: (NAME, OpenMp),
}  # the implementation of Transformers, and the threads that compute ours


def config(hybrid: bool, longest: int) -> PretrainedConfig:
    """The configuration of a model for sequences of up to `longest` tokens."""
    return GraniteMoeHybridConfig(**HYBRID, max_position_embeddings=longest) if hybrid else config_of(SHAPE, longest)


def choose(model: Any, name: str) -> str:
    """Makes a model compute by one of ATTENTIONS, and returns the implementation of its attention."""
    implementation, threads = ATTENTIONS[name]
    model.set_attn_implementation(implementation)
    serve_linear_attention(implementation == NAME)
    load_library().set_omp_team(threads())
    return implementation


def random_caches(model: Any, keys: int) -> dict[str, DynamicCache]:
    """A cache as after a prompt of `keys` tokens for each of ATTENTIONS, all of the same keys and values.

    States of linear layers are kept as the implementation leaves them after a token: their memory layouts differ.
    """
    caches = {}
    for name in ATTENTIONS:
        choose(model, name)
        caches[name] = DynamicCache(config=model.config)
        model(torch.zeros(1, 1, dtype=torch.int64), **{CACHE_ARGUMENT: caches[name]})
    for layers in zip(*(cache.layers for cache in caches.values()), strict=True):
        if isinstance(layers[0], DynamicLayer):
            cached: list[Any] = [layers[0].keys, layers[0].values]
            k, v = (x.new_empty(*x.shape[:2], keys, x.shape[3]).normal_() for x in cached)
            for layer in layers:
                layer.keys, layer.values = k, v
    return caches


def seconds_of_a_token(model: Any, cache: Any, tokens: int) -> float:
    """Seconds of a token, among several in a row. Keys and values are restored afterwards."""
    before = [(layer, layer.keys, layer.values) for layer in cache.layers if isinstance(layer, DynamicLayer)]
    seconds = time_on_device(stepper(model, torch.zeros(1, 1, dtype=torch.int64), cache), tokens, "cpu")
    for layer, keys, values in before:
        layer.keys, layer.values = keys, values
    return seconds


def measure(model: Any, keys: int, part: str, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds of a token, and of all calls of a part in it, by each attention: medians of rounds in turns."""
    caches = random_caches(model, keys)

    def turn(name: str) -> tuple[float, float]:
        implementation = choose(model, name)
        seconds = seconds_of_a_token(model, caches[name], tokens)
        with timed(*functions(part, implementation)) as calls:
            seconds_of_a_token(model, caches[name], tokens)
        return seconds, sum(calls) / tokens

    found = in_turns({name: partial(turn, name) for name in ATTENTIONS}, rounds, warm_up=1)
    return {
        what: {name: median(turn[index] for turn in turns) for name, turns in found.items()}
        for index, what in enumerate(("seconds", f"{part}_seconds"))
    }


def functions(part: str, implementation: str) -> tuple[MutableMapping[str, Any], tuple[str, ...]]:
    """Where models look up the functions of "attention" or of "linear" layers in a token, and their names."""
    if part == "attention":
        return ALL_ATTENTION_FUNCTIONS, (implementation,)
    return vars(modeling_granitemoehybrid), ("causal_conv1d_update", "mamba2_selective_state_update")


@contextmanager
def timed(owner: MutableMapping[str, Any], names: tuple[str, ...]) -> Iterator[list[float]]:
    """Collects the seconds of every call of the functions that models find in `owner` under `names`."""
    before, seconds = {name: owner[name] for name in names}, []

    def timing(name: str, *args: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = before[name](*args, **options)
        seconds.append(time.perf_counter() - start)
        return result

    owner.update({name: partial(timing, name) for name in names})
    try:
        yield seconds
    finally:
        owner.update(before)


@torch.inference_mode()
def main(
    keys: str = "128,512,2048,4096,16384", dtypes: str = "bfloat16,float32", rounds: int = 9, tokens: int = 4,
    hybrid: bool = False, output: Path = RESULTS,
) -> None:  # fmt: skip
    """Measure this machine with torch's number of threads; write decode_in_model.json into `output`.

    hybrid: a model with linear layers instead, and decode_in_hybrid_model.json
    """
    rows = []
    peer, part = (linear.TRANSFORMERS, "linear") if hybrid else ("SDPA", "attention")
    for name in dtypes.split(","):
        lengths = [int(length) for length in keys.split(",")]
        model = build(config(hybrid, max(lengths) + tokens), getattr(torch, name), torch.device("cpu"))
        for length in lengths:
            rows.append({"dtype": name, "keys": length, **measure(model, length, part, rounds, tokens)})
    figures = {"tokens": tokens, "parameters": model.num_parameters(), "rows": rows}
    publish(
        output / f"decode_in_{'hybrid_' if hybrid else ''}model.json", figures, cpu.tokens_of_models(rows, peer, part)
    )


if __name__ == "__main__":
    typer.run(main)
