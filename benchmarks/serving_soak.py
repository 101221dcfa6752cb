"""Does the server lose requests, or grow, under thousands of requests, some of which disconnect or are invalid?

    python benchmarks/serving_soak.py

Starts `fastattention serve` on this CPU with a random model of about 6M parameters. Clients ask concurrently for whole
answers, streams, streams from which they disconnect, and invalid requests. Every request must end as it should. The
server's resident memory is read every second.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from harness import RESULTS
from word_model import save_word_model, words

from fastattention.cli.bench.record import write_record

VOCABULARY = 2000
NONSENSE: tuple[Any, ...] = (
    {"prompt": 3}, {"prompt": words([5] * 3000)}, {"prompt": "t3", "max_tokens": "many"}, {"nonsense": 1}, [],
    {"prompt": "t3", "best_of": 3}, {"prompt": "t3", "temperature": -1.0},
)  # fmt: skip
SHARES = {"whole": 0.5, "stream": 0.25, "left": 0.15, "nonsense": 0.1}


def main(requests: int = 2000, clients: int = 16, output: Path = RESULTS) -> None:
    """Ask, count, write serving_soak.json; exit status 1 for a request that did not end as it should."""
    with tempfile.TemporaryDirectory() as folder:
        save_word_model(
            Path(folder), VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=2048,
        )  # fmt: skip
        with running_server(folder, "--kv-memory=64MiB") as (process, port), watched(process.pid) as memory:
            start = time.monotonic()
            with concurrent.futures.ThreadPoolExecutor(clients) as pool:
                ends = collections.Counter(pool.map(lambda number: ask(port, number), range(requests)))
            seconds = time.monotonic() - start
            process.terminate()
            exit_code = process.wait(60)
    early = [used for at, used in memory if at <= 60] or [used for _, used in memory[:1]]
    report = {
        "requests": requests, "clients": clients, "seconds": seconds,
        "ends": dict(sorted(ends.items())), "exit_code": exit_code,
        "peak_bytes_first_minute": max(early), "peak_bytes": max(used for _, used in memory),
        "last_bytes": memory[-1][1],
    }  # fmt: skip
    write_record(output / "serving_soak.json", report)
    print(json.dumps(report, indent=1))
    if exit_code or any(name.endswith("wrong") for name in ends):
        raise typer.Exit(1)


@contextlib.contextmanager
def running_server(folder: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command and its port."""
    command = [sys.executable, "-m", "fastattention", "serve", folder, "--port=0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)/v1", process.stdout.readline())
        assert found, "the server did not start"
        yield process, int(found[1])
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def watched(pid: int) -> Iterator[list[tuple[float, int]]]:
    """Seconds and resident bytes of a process, once a second."""
    found: list[tuple[float, int]] = []
    start, ended = time.monotonic(), threading.Event()

    def watch() -> None:
        while not ended.wait(1.0):
            status = Path(f"/proc/{pid}/status").read_text()
            used = re.search(r"VmRSS:\s+(\d+)", status)
            if used:
                found.append((time.monotonic() - start, 1024 * int(used[1])))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def ask(port: int, number: int) -> str:
    """Makes one request, by its number, and returns how it ended."""
    chance = random.Random(number)
    kind = chance.choices(list(SHARES), list(SHARES.values()))[0]
    tokens = [chance.randrange(3, VOCABULARY) for _ in range(chance.randint(3, 500))]
    body: dict[str, Any] = {
        "prompt": words(tokens),
        "max_tokens": chance.randint(1, 64),
        "temperature": chance.choice([0.0, 1.0]),
    }
    if kind == "nonsense":
        status, _ = post(port, chance.choice(NONSENSE))
        return kind if status in (400, 422) else f"{kind}: {status} wrong"
    if kind == "whole":
        status, text = post(port, body)
        count = json.loads(text)["usage"]["completion_tokens"] if status == 200 else 0
        return kind if 1 <= count <= body["max_tokens"] else f"{kind}: {status} wrong"
    status, text = post(port, {**body, "stream": True}, None if kind == "stream" else chance.randint(1, 600))
    right = status == 200 and (kind == "left" or text.endswith("data: [DONE]\n\n"))
    return kind if right else f"{kind}: {status} wrong"


def post(port: int, body: Any, count: int | None = None) -> tuple[int, str]:
    """The status and `count` bytes of the answer, after which the client disconnects; None reads all."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        with connection.getresponse() as response:
            return response.status, response.read(count).decode()


if __name__ == "__main__":
    typer.run(main)
