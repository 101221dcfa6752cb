"""How many tokens a second does vLLM generate on this CPU, with its own attention and with the plugin's?

    plugins/vllm/test.sh tests/test_registration.py                 # makes the environment
    plugins/vllm/.venv/bin/python benchmarks/serving_vllm.py MODEL  # a folder that `serving.py --save MODEL` wrote

The load is that of benchmarks/serving.py on a CPU. Each run is a process of its own, in turns; the second of two equal
loads counts, since vLLM warms up in the first.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import RESULTS, run_again

from fastattention.cli.bench.record import write_record
from fastattention.cli.bench.timing import in_turns

PEERS = {"vLLM with the plugin": "1", "vLLM": "0"}
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
}  # fmt: skip


def main(
    folder: Path,
    rounds: int = 2,
    output: Path = RESULTS,
    one: Annotated[bool, typer.Option("--one", hidden=True, help="Measure here, print JSON.")] = False,
) -> None:
    """Run both in turns; add "vllm" to the serving_cpu.json in `output`."""
    if one:
        print(json.dumps(generate(folder)))
        return

    def turn(switch: str) -> dict[str, Any]:
        return dict(run_again(__file__, str(folder), "--one", FASTATTENTION_VLLM=switch, **VARIABLES))

    answers = in_turns({name: partial(turn, switch) for name, switch in PEERS.items()}, rounds)
    seconds = {name: [answer["seconds"] for answer in found] for name, found in answers.items()}
    last = answers["vLLM"][-1]
    rates = {name: last["tokens"] / statistics.median(taken) for name, taken in seconds.items()}
    print("new tokens/s:", rates)
    path = output / "serving_cpu.json"
    found = {"rates": rates, "seconds": seconds, "version": last["version"]}
    write_record(path, {**json.loads(path.read_text()), "vllm": found})


def generate(folder: Path) -> dict[str, Any]:
    """Seconds of the second load, its tokens, and vLLM's version."""
    import torch
    import vllm  # type: ignore[import-not-found]

    load = json.loads((folder / "load.json").read_text())
    torch.set_num_threads(os.cpu_count() or 1)
    engine = vllm.LLM(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=2048, max_num_seqs=32,
        max_num_batched_tokens=2048, kv_cache_memory_bytes=1 << 30, enforce_eager=True, enable_prefix_caching=False,
    )  # fmt: skip
    sampling = vllm.SamplingParams(temperature=0, max_tokens=load["new_tokens"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in load["prompts"]]
    for _ in range(2):
        start = time.perf_counter()
        found = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in found)
    return {"seconds": seconds, "tokens": tokens, "version": vllm.__version__}


if __name__ == "__main__":
    typer.run(main)
