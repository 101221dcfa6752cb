"""How many new tokens a second does the server give, and how many does the batch give that it serves?

    python benchmarks/serving_load.py [--device cuda]

Starts `fastattention serve` with a random Llama. Clients ask for whole answers, each for the next one as soon as it has
the last. In turns, Transformers' `generate_batch` answers the same prompts in this process, as many at a time.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import serving as page
from serving_soak import post, running_server
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from word_model import save_word_model

from fastattention.cli.bench.timing import in_turns
from fastattention.integrations.transformers import batching

VOCABULARY = 32000
SHAPES = {
    "cpu": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
            "num_key_value_heads": 4, "max_position_embeddings": 4096},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
             "num_key_value_heads": 8, "max_position_embeddings": 8192},
}  # fmt: skip
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
CLIENTS = {"cpu": (1, 8), "cuda": (1, 64, 128)}
LONGEST = 400  # tokens of a prompt
NEW_TOKENS = 64
PAGE = 256
_first_tokens = itertools.count(3)  # of prompts: none finds pages of an earlier one in the cache


def main(device: str = "cpu", rounds: int = 3, output: Path = RESULTS) -> None:
    """Measure in turns, print, write serving_load_cpu.json or serving_load_gpu.json."""
    with tempfile.TemporaryDirectory() as folder:
        save_word_model(Path(folder), VOCABULARY, **SHAPES[device])
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[device], attn_implementation="fast_attention"
        )
        model.to(device)
        batching.enable()
        options = (f"--device={device}", f"--dtype={str(DTYPES[device]).removeprefix('torch.')}", "--kv-memory=2GiB")
        with running_server(folder, *options) as (_, port):
            turns = {}
            for clients in CLIENTS[device]:
                prompts = draw_prompts(clients)
                turns[clients, "server"] = partial(by_server, port, prompts, clients)
                turns[clients, "batch"] = partial(by_batch, model, prompts, clients)
            found = in_turns(turns, rounds)
    records = [
        {"clients": clients, "requests": len(draw_prompts(clients)), "seconds": {
            name: found[clients, name] for name in ("server", "batch")}}
        for clients in CLIENTS[device]
    ]  # fmt: skip
    report = {
        "device": device, "shape": SHAPES[device], "dtype": str(DTYPES[device]), "longest": LONGEST,
        "new_tokens": NEW_TOKENS, "records": records,
    }  # fmt: skip
    publish(output / f"serving_load_{device.replace('cuda', 'gpu')}.json", report, *page.load(report))


def draw_prompts(clients: int) -> list[list[int]]:
    """Three for each client, at least twelve, of lengths in equal steps and in random order."""
    generator = torch.Generator().manual_seed(clients)
    count = max(3 * clients, 12)
    lengths = torch.linspace(1, LONGEST, count).int()[torch.randperm(count, generator=generator)].tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def by_server(port: int, prompts: list[list[int]], clients: int) -> float:
    """Seconds until every prompt is answered."""

    def ask(prompt: list[int]) -> int:
        body = {
            "prompt": [next(_first_tokens), *prompt],
            "max_tokens": NEW_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
        }
        status, text = post(port, body)
        assert status == 200, text
        return int(json.loads(text)["usage"]["completion_tokens"])

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        counts = list(pool.map(ask, prompts))
    assert set(counts) == {NEW_TOKENS}
    return time.perf_counter() - start


def by_batch(model: Any, prompts: list[list[int]], clients: int) -> float:
    """Seconds of `generate_batch`."""
    generation = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=(clients + 1) * (LONGEST + NEW_TOKENS + PAGE) // PAGE * 2,
        max_requests_per_batch=clients,
        max_batch_tokens=512 if model.device.type == "cpu" else 2048,
    )
    start = time.perf_counter()
    found = model.generate_batch(prompts, generation_config=generation, continuous_batching_config=config)
    assert all(len(one.generated_tokens) == NEW_TOKENS for one in found.values())
    return time.perf_counter() - start


if __name__ == "__main__":
    typer.run(main)
