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
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PEERS = {"vLLM with the plugin": "1", "vLLM": "0"}


def main(folder: Path, rounds: int = 2) -> None:
    """Runs both in turns; adds "vllm" to serving_cpu.json."""
    taken: dict[str, list[float]] = {name: [] for name in PEERS}
    answer: dict[str, Any] = {}
    for _ in range(rounds):
        for name, switch in PEERS.items():
            environment = {**os.environ, "FASTATTENTION_VLLM": switch, "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                           "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                           "VLLM_LOGGING_LEVEL": "ERROR"}  # fmt: skip
            command = [sys.executable, __file__, str(folder), "one"]
            finished = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
            answer = json.loads(finished.stdout.splitlines()[-1])
            taken[name].append(answer["seconds"])
            print(f"{name}: {answer['tokens'] / answer['seconds']:.1f} new tokens/s", flush=True)
    rates = {name: answer["tokens"] / statistics.median(seconds) for name, seconds in taken.items()}
    path = RESULTS / "serving_cpu.json"
    report = json.loads(path.read_text())
    report["vllm"] = {"rates": rates, "seconds": taken, "version": answer["version"]}
    path.write_text(json.dumps(report, indent=1) + "\n")


def one(folder: Path) -> None:
    """Prints the seconds of the second load, as JSON."""
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
    print(json.dumps({"seconds": seconds, "tokens": tokens, "version": vllm.__version__}))


if __name__ == "__main__":
    if sys.argv[2:] == ["one"]:
        one(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]))
