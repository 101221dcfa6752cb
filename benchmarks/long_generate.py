"""How long does a whole call of generate take whose context does not fit the GPU, and how much of it is the prompt?

    python benchmarks/long_generate.py

Transformers' own Llama of the shape of an 8B model, with random weights and a random prompt, within a budget of GPU
memory for all that the process takes of it.
"""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from random_llama import random_llama
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from fastattention.cli.bench.report import SCHEMA, title
from fastattention.cli.console import OUTPUT
from fastattention.cli.machine import describe_machine
from fastattention.integrations.transformers import NAME, FastAttentionCache
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from fastattention.offload.memory import PREFILL_CHUNK
from fastattention.offload.model_shape import PRESETS
from fastattention.sizes import format_bytes

RESULTS = Path(__file__).parent / "results"


class Clock(BaseStreamer):
    """When tokens come: the prompt first, then each new one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Tokens, on the CPU."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """No more come."""


def measure(model: Any, cache: FastAttentionCache, prompt: int, new_tokens: int) -> dict[str, Any]:
    """The figures of one call."""
    tokens = torch.randint(model.config.vocab_size, (1, prompt), device="cuda")
    clock = Clock()
    torch.cuda.reset_peak_memory_stats()
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), **{CACHE_ARGUMENT: cache}, streamer=clock, do_sample=False,
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, prefill_chunk_size=PREFILL_CHUNK,
    )  # fmt: skip
    start, *times = clock.times
    steps = [after - before for before, after in pairwise(times)]
    usage = cache.usage
    return {
        "prompt": prompt,
        "new_tokens": new_tokens,
        "prefill_seconds": times[0] - start,
        "decode_seconds": sum(steps),
        "seconds_per_token": median(steps),
        "policy": cache.policy.value,
        "num_layers_cpu": usage.num_layers_cpu,
        "kv_gpu_bytes": usage.gpu_bytes,
        "kv_cpu_bytes": usage.cpu_bytes,
        "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
    }


def main(
    model: str = "llama-3-8b",
    prompt: int = 262144,
    new_tokens: int = 32,
    gpu_memory: str = "32GiB",
    output: Path = RESULTS,
) -> None:
    """Measure the current GPU and its host; write long_generate.json into `output`."""
    llama = random_llama(PRESETS[model], prompt + new_tokens, NAME, torch.bfloat16, torch.device("cuda"))
    warm = FastAttentionCache(llama.config, gpu_memory=gpu_memory)
    measure(llama, warm, 4096, 2)  # kernels are compiled and bandwidths measured
    del warm
    cache = FastAttentionCache(llama.config, gpu_memory=gpu_memory)
    row = {"model": model, "gpu_memory": gpu_memory, **measure(llama, cache, prompt, new_tokens)}
    machine = describe_machine()
    OUTPUT.print(title(machine))
    OUTPUT.print(
        f"{prompt} tokens of {model} within {gpu_memory}: prefill {row['prefill_seconds']:.1f} s, then "
        f"{1e3 * row['seconds_per_token']:.1f} ms a token ({row['policy']}, {row['num_layers_cpu']} layers on the CPU, "
        f"{format_bytes(row['kv_gpu_bytes'])} of the cache on the GPU and {format_bytes(row['kv_cpu_bytes'])} on the "
        f"CPU); {format_bytes(row['gpu_peak_bytes'])} of the GPU at most"
    )
    record = {"schema": SCHEMA, "question": "long_generate", "machine": machine, "rows": [row]}
    output.mkdir(parents=True, exist_ok=True)
    (output / "long_generate.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
