"""Runs real clients against `fastattention serve` with a tiny model, and prints which feature each was served.

tests/integrations/clients/test.sh
tests/integrations/clients/test.sh --record      # writes requests.json, what the clients sent, for the tests
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from integrations.clients.calls import CLIENTS, MODEL, Server, version
from integrations.serving_models import save_byte_model

RECORD = Path(__file__).with_name("requests.json")
LEFT_OUT = ("host", "content-length", "x-amzn-trace-id")  # other in every run


@contextlib.contextmanager
def command(folder: Path) -> Iterator[str]:
    """The address of the server that the command line starts."""
    options = ["--port=0", f"--name={MODEL}", "--device=cpu", "--kv-memory=8MiB", "--tool-format=hermes"]
    with subprocess.Popen(
        [sys.executable, "-m", "fastattention", "serve", str(folder), *options], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found, line
            yield found[0]
        finally:
            process.terminate()


class Recorder:
    """The server in this process, and the requests that it gets."""

    def __init__(self, folder: Path) -> None:
        from fastattention.integrations.transformers.serving.server import Settings, load

        self.requests: list[dict[str, Any]] = []
        self._service = load(Settings(str(folder), MODEL, device="cpu", kv_memory=8 << 20, tool_format="hermes"), print)
        self._app = self._service.app()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        kept = {name: value for name, value in headers.items() if name not in LEFT_OUT}
        body = b"".join(one["body"] for one in messages)
        self.requests.append({"path": scope["path"], "headers": kept, "body": json.loads(body) if body else None})

        async def again() -> Any:
            return messages.pop(0) if messages else await receive()

        await self._app(scope, again, send)

    @contextlib.contextmanager
    def listening(self) -> Iterator[str]:
        self._service.engine.start()
        server = uvicorn.Server(uvicorn.Config(self, port=0, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            thread.join(0.05)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join()
        self._service.engine.stop(5)


def run(server: Server, recorder: Recorder | None) -> tuple[dict[str, dict[str, str]], list[dict[str, Any]]]:
    """The result of each client and feature, and what was sent."""
    results: dict[str, dict[str, str]] = {}
    sent: list[dict[str, Any]] = []
    for client, make in CLIENTS.items():
        results[f"{client} {version(client)}"] = row = {}
        for feature, call in make(server).items():
            try:
                call()
                row[feature] = "yes"
            except Exception as error:
                traceback.print_exc()
                print(getattr(error, "stdout", ""), getattr(error, "stderr", ""), file=sys.stderr)
                row[feature] = "FAILED"
            if recorder is not None:
                new = [one for at, one in enumerate(recorder.requests) if one not in recorder.requests[:at]]
                sent += [{"client": f"{client} {version(client)}", "feature": feature, **one} for one in new]
                recorder.requests.clear()
    return results, sent


def main() -> None:
    os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1"}  # its prices come from the network
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_byte_model(folder)
        recorder = Recorder(folder) if "--record" in sys.argv else None
        with command(folder) if recorder is None else recorder.listening() as url:
            results, sent = run(Server(url, folder), recorder)
    features = list(dict.fromkeys(feature for row in results.values() for feature in row))
    print(f"| client | {' | '.join(features)} |\n|---|{'---|' * len(features)}")
    for client, row in results.items():
        print(f"| {client} | {' | '.join(row.get(feature, '') for feature in features)} |")
    cells = [cell for row in results.values() for cell in row.values()]
    print(f"{cells.count('yes')} passed, {cells.count('FAILED')} failed")
    if "FAILED" in cells:
        sys.exit(1)
    if recorder is not None:
        RECORD.write_text("[\n" + ",\n".join(json.dumps(one, sort_keys=True) for one in sent) + "\n]\n")


if __name__ == "__main__":
    main()
