"""`fastattention demo`: three implementations of attention continue a source file, side by side."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

import fastattention
from fastattention.cli.choices import AttnImplementation
from fastattention.cli.console import OUTPUT, check_model_folder, fail, progress_bar, require_extra
from fastattention.cli.demo_messages import DemoRequest, Result
from fastattention.cli.machine import cpu_model
from fastattention.errors import ArgumentError

# A larger module of the standard library that the demo model has not seen in training.
DEFAULT_SOURCE = Path(functools.__file__)
SHOWN_CONTEXT_LINES = 6
READ_BYTES = 1 << 20  # bytes that are read at a time


def demo(source: Path, context_bytes: int, max_new_tokens: int, model: Path) -> None:
    """Continue the first `context_bytes` of `source` with every implementation and show them in one table.

    Exits with status 1 when their tokens differ.
    """
    require_extra("transformers", "transformers")
    _check_model(model)
    prompt = read_context(source, context_bytes)
    requests = [
        DemoRequest(str(model), attention.value, prompt, max_new_tokens, fastattention.get_num_threads())
        for attention in AttnImplementation
    ]
    results = []
    with progress_bar() as bar:
        tasks = [bar.add_task(request.attention, total=1.0, start=False) for request in requests]
        for request, task in zip(requests, tasks, strict=True):
            bar.start_task(task)
            results.append(run_request(request, lambda fraction, task=task: bar.update(task, completed=fraction)))  # type: ignore[misc]
    OUTPUT.print(_table(results))
    OUTPUT.print(_continuation(prompt, results[-1]))
    if any(result.tokens != results[0].tokens for result in results):
        raise fail("the implementations chose different tokens")


def _check_model(model: Path) -> None:
    """Raises ArgumentError for a folder without a model. The message says where the demo's own model is."""
    try:
        check_model_folder(model)
    except ArgumentError as error:
        raise ArgumentError(
            f"{error}; the installed package holds no model: run `make demo` in the source tree, "
            "or name a Transformers model folder with --model"
        ) from error


def read_context(source: Path, context_bytes: int) -> str:
    """The first `context_bytes` of a text file, cut after the last complete line. Raises ArgumentError without one."""
    start = b""
    try:
        with source.open("rb") as stream:
            while part := stream.read(min(context_bytes - len(start), READ_BYTES)):
                start += part
    except OSError as error:
        raise ArgumentError(
            f"file {str(source)!r} cannot be read: {error.strerror}; name a text file with --file"
        ) from error
    if len(start) < context_bytes:
        raise ArgumentError(
            f"file {str(source)!r} has {len(start)} bytes; the context wants {context_bytes}, see --context"
        )
    lines = start.decode(errors="ignore").splitlines(keepends=True)
    if not lines:
        raise ArgumentError(f"file {str(source)!r} is no text in UTF-8; name a text file with --file")
    return "".join(lines if lines[-1].endswith("\n") or len(lines) == 1 else lines[:-1])


def run_request(request: DemoRequest, on_progress: Callable[[float], None]) -> Result:
    """Run a request in a process of its own. Exits with the worker's message when it fails."""
    with tempfile.TemporaryFile("w+") as messages:
        worker = subprocess.Popen(
            [sys.executable, "-m", "fastattention.cli.demo_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        with worker, worker.stdin as stdin:
            json.dump(asdict(request), stdin)
            stdin.close()
            answer: dict[str, object] = {}
            for line in worker.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    on_progress(float(str(answer["progress"])))
        if "error" in answer:
            raise fail(f"{request.attention}: {answer['error']}")
        if worker.returncode or "result" not in answer:
            messages.seek(0)
            raise fail(f"{request.attention} ended with status {worker.returncode}:\n{messages.read().strip()}")
    return Result(**answer["result"])  # type: ignore[arg-type]


def _table(results: list[Result]) -> Table:
    first = results[0]
    title = (
        f"{first.prompt_tokens} tokens of context, {len(first.tokens)} new tokens, float32, "
        f"{fastattention.get_num_threads()} threads of {cpu_model()}"
    )
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("attention")
    for heading in ("same tokens", "prompt", "a token", "peak extra memory"):
        table.add_column(heading, justify="right")
    for result in results:
        per_token = result.decode_seconds / max(1, len(result.tokens) - 1)
        memory = "not measurable here" if result.extra_bytes is None else f"{result.extra_bytes / 1e6:.0f} MB"
        table.add_row(
            result.attention,
            _agreement(first, result),
            f"{result.prefill_seconds:.2f} s",
            f"{per_token * 1e3:.2f} ms",
            memory,
        )
    return table


def _continuation(prompt: str, result: Result) -> Panel:
    """The last lines of the context, dim, and the new text after them."""
    context = prompt.splitlines(keepends=True)[-SHOWN_CONTEXT_LINES:]
    code = Syntax("".join(context) + result.text, "python", word_wrap=True, background_color="default")
    code.stylize_range("dim", (1, 0), (len(context) + 1, 0))
    title = f"the end of the context, dim, and what {result.attention} wrote after it"
    return Panel(code, title=title, title_align="left", box=box.ROUNDED)


def _agreement(first: Result, other: Result) -> str:
    if first is other:
        return ""
    pairs = zip(first.tokens, other.tokens, strict=True)
    different = next((index for index, (one, two) in enumerate(pairs) if one != two), None)
    return "[green]yes[/]" if different is None else f"[red]not from {different}[/]"
