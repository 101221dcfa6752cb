"""`fastattention serve`: its start, and its end by signals."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tiers import slow
from typer.testing import CliRunner

from fastattention.cli.main import app
from fastattention.errors import ArgumentError
from fastattention.integrations.transformers.serving import server as serving
from fastattention.integrations.transformers.serving.app import Limits
from integrations.serving_models import Served, serve

ENDLESS = {"prompt": "t3 t4", "max_tokens": 500, "ignore_eos": True}


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    found = serve(folder)
    yield found
    found.service.engine.stop(10)


def end_by_signals(
    served: Served, monkeypatch: pytest.MonkeyPatch, count: int, grace: float, stream: bool = False
) -> bytes:
    """What a client got whose request was under way when `count` signals came.

    With two signals, the step under way ends only afterwards.
    """
    engine = served.service.engine
    step = engine._step
    text = json.dumps({**ENDLESS, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    begun, go_on = asyncio.Event(), threading.Event()

    async def run() -> bytes:
        loop = asyncio.get_running_loop()

        def watched_step() -> bool:
            busy = step()
            if engine.running:
                loop.call_soon_threadsafe(begun.set)
                assert count == 1 or go_on.wait(120)
            return busy

        monkeypatch.setattr(engine, "_step", watched_step)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            config = uvicorn.Config(served.service.app(), log_level="error", lifespan="off")
            server = serving._Server(config, engine, grace, lambda: None, lambda _: None)
            running = asyncio.ensure_future(server.serve([listener]))
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(head + text)
            await begun.wait()
            for _ in range(count):
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait_for(running, 60)
            found = await reader.read() if count == 1 else b""
            writer.close()
            go_on.set()
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_requests_that_outlast_the_grace_are_told(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    found = end_by_signals(served, monkeypatch, 1, 0.0, stream=stream)
    assert b"the server has ended before the answer" in found
    assert (b"503" in found.splitlines()[0]) != stream


def test_a_second_signal_ends_at_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    end_by_signals(served, monkeypatch, 2, 10_000.0)


@pytest.mark.parametrize(
    ("host", "key", "warned"), [("0.0.0.0", None, True), ("0.0.0.0", "k", False), ("localhost", None, False)]
)
def test_an_open_server_without_a_key_is_warned_of(folder: Path, host: str, key: str | None, warned: bool) -> None:
    announced: list[str] = []
    warnings: list[str] = []

    def announce(line: str) -> None:
        announced.append(line)
        signal.raise_signal(signal.SIGINT)

    limits = Limits(api_key=key)
    settings = serving.Settings(str(folder), host=host, port=0, device="cpu", kv_memory=4 << 20, limits=limits)
    serving.serve(settings, announce, warnings.append)
    assert len(announced) == 1
    assert any("can be reached from other machines" in line for line in warnings) == warned


def test_a_key_comes_from_the_environment_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []
    monkeypatch.setattr(serving, "serve", lambda settings, *_: found.append(settings.limits.api_key))
    monkeypatch.setenv("FASTATTENTION_API_KEY", "one")
    for options in ([], ["--api-key=two"]):
        assert CliRunner().invoke(app, ["serve", str(folder), *options]).exit_code == 0
    assert found == ["one", "two"]


@slow
def test_the_command_finishes_requests_under_way_before_it_ends(folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fastattention",
        "serve",
        str(folder),
        "--port=0",
        "--kv-memory=4MiB",
        "--name=one",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 120)[0]
            line = process.stdout.readline()
            found = re.search(
                r"serving one at http://127.0.0.1:(\d+)/v1: cpu, float32, keys and values of (\d+) tokens", line
            )
            assert found, line
            assert int(found[2]) == 4 * 2**20 // (2 * 2 * 8 * 2 * 4 * 256) * 256

            def ask() -> tuple[int, Any]:
                with contextlib.closing(http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=120)) as server:
                    server.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": True}))
                    response = server.getresponse()
                    first = response.read(1)
                    process.send_signal(signal.SIGTERM)
                    return response.status, first + response.read()

            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                status, text = pool.submit(ask).result()
            assert status == 200
            assert text.endswith(b"data: [DONE]\n\n")
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"port={taken.getsockname()[1]}"
        finished = CliRunner().invoke(app, ["serve", str(folder), f"--{port}"])
    assert finished.exit_code == 1
    assert port in finished.output


def test_memory_for_less_than_two_blocks_is_refused(folder: Path) -> None:
    with pytest.raises(ArgumentError, match="kv_memory=1000 bytes hold less than two blocks of"):
        serving.load(serving.Settings(str(folder), device="cpu", kv_memory=1000), print)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["no/such/model/here"], "neither a folder nor a name on the hub"),
        (["{folder}", "--kv-memory=much"], "--kv-memory='much' is no size"),
        (["{folder}", "--max-request-bytes=much"], "--max-request-bytes='much' is no size"),
        (["{folder}", "--api-key="], "--api-key must be characters that can be printed, at least one"),
        (["{folder}", "--continuous-batching"], "No such option"),
        (["{folder}", "--device=nothing"], "nothing"),
    ],
)
def test_options_that_make_no_sense_are_refused(folder: Path, options: list[str], message: str) -> None:
    finished = CliRunner().invoke(app, ["serve", *(one.format(folder=folder) for one in options)])
    assert finished.exit_code in (1, 2)
    assert message in " ".join(finished.output.split())
