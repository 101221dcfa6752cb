"""`fastattention demo`: three implementations of attention continue a source file, side by side."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.panel import Panel
from rich.progress import TaskID
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
ROUNDS = 3
LONG_SECONDS = 60.0  # no other round begins after this time
BUSY_SPREAD = 1.3  # times of the same work that differ by more: other programs take the processor

Turn = Callable[[Callable[[float], None]], Result]  # takes a callback for the fraction done, 0 to 1


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
    turns = take_turns(requests)
    OUTPUT.print(_table(turns))
    if (spread := _spread(turns)) > BUSY_SPREAD:
        OUTPUT.print(
            f"The machine is busy: the same work took up to {spread:.1f}x as long in another turn. "
            "Run the demo again when nothing else runs.",
            style="yellow",
        )
    OUTPUT.print(_continuation(prompt, turns[-1][0]))
    if any(result.tokens != turns[0][0].tokens for results in turns for result in results):
        raise fail("the implementations chose different tokens")


def take_turns(requests: Sequence[DemoRequest]) -> list[list[Result]]:
    """The results of each request. Processes that have loaded the model take turns, in both orders."""
    turns: list[list[Result]] = [[] for _ in requests]
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar())
        tasks = [bar.add_task(request.attention, total=ROUNDS) for request in requests]
        workers = [stack.enter_context(worker(request)) for request in requests]
        started = time.perf_counter()
        for done in range(ROUNDS):
            order = range(len(requests)) if done % 2 == 0 else reversed(range(len(requests)))
            for index in order:

                def on_progress(fraction: float, task: TaskID = tasks[index], done: int = done) -> None:
                    bar.update(task, completed=done + fraction)

                turns[index].append(workers[index](on_progress))
            if time.perf_counter() - started > LONG_SECONDS:
                break
    return turns


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


@contextmanager
def worker(request: DemoRequest) -> Iterator[Turn]:
    """A function that runs the request once, in a process that has loaded the model and run a short one.

    It exits with the process's message when that fails.
    """
    with (
        tempfile.TemporaryFile("w+") as messages,
        subprocess.Popen(
            [sys.executable, "-m", "fastattention.cli.demo_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        commands, answers = process.stdin, process.stdout

        def ask(command: str, on_progress: Callable[[float], None]) -> Any:
            with suppress(BrokenPipeError):  # the answer says why the process ended
                print(command, file=commands, flush=True)
            for line in answers:
                ((kind, value),) = json.loads(line).items()
                if kind == "progress":
                    on_progress(value)
                elif kind == "error":
                    raise fail(f"{request.attention}: {value}")
                else:
                    return value
            messages.seek(0)
            raise fail(f"{request.attention} ended with status {process.wait()}:\n{messages.read().strip()}")

        ask(json.dumps(asdict(request)), lambda fraction: None)
        yield lambda on_progress: Result(**ask("run", on_progress))


def _table(turns: Sequence[Sequence[Result]]) -> Table:
    first = turns[0][0]
    measured = f"medians of {len(turns[0])} turns" if len(turns[0]) > 1 else "measured once"
    title = (
        f"{first.prompt_tokens} tokens of context, {len(first.tokens)} new tokens, float32, "
        f"{fastattention.get_num_threads()} threads of {cpu_model()}, {measured}"
    )
    table = Table(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("attention")
    for heading in ("same tokens", "prompt", "a token", "peak extra memory"):
        table.add_column(heading, justify="right")
    for results in turns:
        per_token = median(one.decode_seconds for one in results) / max(1, len(results[0].tokens) - 1)
        # Later turns reuse memory of the first.
        peaks = [one.extra_bytes for one in results if one.extra_bytes is not None]
        table.add_row(
            results[0].attention,
            _agreement(first, results[0]),
            f"{median(one.prefill_seconds for one in results):.2f} s",
            f"{per_token * 1e3:.2f} ms",
            f"{max(peaks) / 1e6:.0f} MB" if peaks else "not measurable here",
        )
    return table


def _spread(turns: Sequence[Sequence[Result]]) -> float:
    """How much longer the slowest turn of an implementation took than its fastest, at most."""
    times = [[one.prefill_seconds + one.decode_seconds for one in results] for results in turns]
    return max(max(each) / min(each) for each in times)


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
