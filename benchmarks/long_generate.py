"""How long does a whole call of generate take whose context does not fit the GPU, and how much of it is the prompt?

    python benchmarks/long_generate.py

Models of Transformers with random weights and a random prompt, within a budget of GPU memory for the whole process. The
plan, by bandwidths measured in the same process, is shown for comparison. A model of eight tensor-parallel ranks is one
rank's share: the GPU stands for one rank, does not communicate, and has the host to itself.
"""

from __future__ import annotations

import gc
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import typer
from harness import RESULTS, show
from pages import long_contexts
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.whole_model.build import build, find_config, find_shape
from fastattention.cli.machine import describe_machine
from fastattention.integrations.transformers import NAME, FastAttentionCache
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from fastattention.offload.measure import hardware_around
from fastattention.offload.memory import PAGE_SIZE, PREFILL_CHUNK, prompt_workspace
from fastattention.offload.model_shape import ModelShape
from fastattention.offload.pages import PageShape
from fastattention.offload.placement import place
from fastattention.sizes import read_bytes


@dataclass(frozen=True)
class Case:
    """One row of the results. chunk: tokens of a prompt that pass through the model at once."""

    model: str
    gpu_memory: str
    chunk: int = PREFILL_CHUNK


# With the weights of LLaMA-3-8B 1 GiB of 16 is free, where the usual chunk does not fit.
CASES = (
    Case("llama-3-8b", "32GiB"),
    Case("llama-3-8b", "16GiB", chunk=2048),
    Case("pangu-38b/8", "32GiB"),
    Case("pangu-38b/8", "16GiB"),
)


class Clock(BaseStreamer):
    """Records when tokens come: the prompt first, then each new one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Receives tokens, on the CPU."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Receives the end of generation."""


def measure(model: Any, cache: FastAttentionCache, prompt: int, new_tokens: int, chunk: int) -> dict[str, Any]:
    """The figures of one call."""
    tokens = torch.randint(model.config.vocab_size, (1, prompt), device="cuda")
    clock = Clock()
    torch.cuda.reset_peak_memory_stats()
    model.generate(
        tokens, attention_mask=torch.ones_like(tokens), **{CACHE_ARGUMENT: cache}, streamer=clock, do_sample=False,
        max_new_tokens=new_tokens, min_new_tokens=new_tokens, prefill_chunk_size=chunk,
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


def plan(case: Case, shape: ModelShape, seqlen: int, workspace: int) -> dict[str, Any]:
    """The prediction for this machine."""
    page = PageShape(PAGE_SIZE, shape.nheads_k, shape.headdim, shape.headdim_v, torch.bfloat16)
    hardware = hardware_around(torch.device("cuda", 0), page)
    gpu_memory = read_bytes("gpu_memory", case.gpu_memory)
    placement = place(shape, hardware, batch_size=1, seqlen=seqlen, gpu_memory=gpu_memory, workspace=workspace)
    return {
        "policy": placement.policy.value,
        "num_layers_cpu": placement.num_layers_cpu,
        "seconds_per_token": placement.seconds,
        "hardware": asdict(hardware),
    }


def run(case: Case, prompt: int, new_tokens: int) -> dict[str, Any]:
    """A row of the results, measured on a new model."""
    shape = find_shape(case.model)
    model: Any = build(find_config(case.model, None, prompt + new_tokens), torch.bfloat16, torch.device("cuda", 0))
    model.set_attn_implementation(NAME)
    workspace = prompt_workspace(shape) * case.chunk // PREFILL_CHUNK

    def call(prompt: int, new_tokens: int) -> dict[str, Any]:
        cache = FastAttentionCache(model.config, gpu_memory=case.gpu_memory, workspace=workspace)
        return measure(model, cache, prompt, new_tokens, case.chunk)

    call(2 * case.chunk, 2)  # kernels are compiled and bandwidths measured
    gc.collect()
    measured = call(prompt, new_tokens)
    return {**asdict(case), **measured, "plan": plan(case, shape, prompt + new_tokens, workspace)}


def main(prompt: int = 262144, new_tokens: int = 32, output: Path = RESULTS) -> None:
    """Measure the first GPU and its host; write long_generate.json into `output`."""
    machine = describe_machine()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows.append(run(case, prompt, new_tokens))
        write_record(output / "long_generate.json", {"machine": machine, "rows": rows})
        gc.collect()
    show(long_contexts.generated(rows))


if __name__ == "__main__":
    typer.run(main)
