"""Does a long prompt hold up answers that are under way?

    python benchmarks/serving_fairness.py [--device cuda]

Starts `fastattention serve` with a random Llama. Eight clients stream answers. Then one asks about a long prompt. The
times between the tokens that streams receive are compared: before the long prompt, and while it is read. The long
prompt is also read alone.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS, publish
from pages import serving as page
from serving_load import DTYPES, SHAPES, VOCABULARY
from serving_soak import post, running_server
from word_model import save_word_model

CLIENTS, PROMPT, POSITIONS = 8, 50, 65536
LONG = {"cpu": 8000, "cuda": 30000}
QUIET = 8.0  # seconds of streams before the long prompt
_generator = torch.Generator().manual_seed(0)


def main(device: str = "cpu", rounds: int = 3, output: Path = RESULTS) -> None:
    """Measure, print, write serving_fairness_cpu.json or serving_fairness_gpu.json."""
    with tempfile.TemporaryDirectory() as folder:
        save_word_model(Path(folder), VOCABULARY, **{**SHAPES[device], "max_position_embeddings": POSITIONS})
        options = (f"--device={device}", f"--dtype={str(DTYPES[device]).removeprefix('torch.')}", "--kv-memory=4GiB")
        with running_server(folder, *options) as (_, port):
            records = [measure(port, LONG[device]) for _ in range(rounds)]
    report = {
        "device": device, "shape": SHAPES[device], "dtype": str(DTYPES[device]), "clients": CLIENTS,
        "long": LONG[device], "records": records,
    }  # fmt: skip
    publish(output / f"serving_fairness_{device.replace('cuda', 'gpu')}.json", report, *page.fairness(report))


def measure(port: int, long: int) -> dict[str, Any]:
    """Seconds between tokens before and while a long prompt is read, and the seconds of reading it."""
    alone = _read(port, long)
    ended = threading.Event()
    times: list[list[float]] = [[] for _ in range(CLIENTS)]
    threads = [threading.Thread(target=_stream, args=(port, one, ended)) for one in times]
    for thread in threads:
        thread.start()
    time.sleep(QUIET)
    start = time.perf_counter()
    beside = _read(port, long)
    end = time.perf_counter()
    ended.set()
    for thread in threads:
        thread.join()
    gaps = [(at, after - at) for one in times for at, after in itertools.pairwise(one)]
    before = [gap for at, gap in gaps if start - QUIET / 2 < at < start]
    during = [gap for at, gap in gaps if start < at < end]
    return {"alone": alone, "beside": beside, "before": _summary(before), "during": _summary(during)}


def _summary(gaps: list[float]) -> dict[str, float]:
    quantiles = torch.tensor(gaps, dtype=torch.float64).quantile(torch.tensor([0.5, 0.99, 1.0], dtype=torch.float64))
    return dict(zip(("median", "p99", "longest"), quantiles.tolist(), strict=True))


def _prompt(length: int) -> list[int]:
    return torch.randint(3, VOCABULARY, (length,), generator=_generator).tolist()


def _read(port: int, length: int) -> float:
    """Seconds until the first token after a prompt."""
    start = time.perf_counter()
    status, text = post(port, {"prompt": _prompt(length), "max_tokens": 1})
    assert status == 200, text
    return time.perf_counter() - start


def _stream(port: int, times: list[float], ended: threading.Event) -> None:
    """Streams an answer until `ended`. Notes when its tokens arrive."""
    body = {"prompt": _prompt(PROMPT), "max_tokens": POSITIONS // 2, "ignore_eos": True, "stream": True}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        while not ended.is_set():
            if response.readline().startswith(b"data: {"):
                times.append(time.perf_counter())


if __name__ == "__main__":
    typer.run(main)
