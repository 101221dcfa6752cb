"""Code that commands share: progress bars, errors without a traceback, and checks of paths."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from fastattention.errors import ArgumentError, FastAttentionError

# Text from outside (paths, reasons, shapes) may hold square brackets: escape it wherever it meets markup.
OUTPUT = Console(highlight=False)
MESSAGES = Console(stderr=True, highlight=False)

# PyTorch has no exception type for host memory that cannot be allocated.
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn an exception of the package, or an error of the system, into one message and exit status 1.

    Other exceptions are our bugs: their tracebacks are for a bug report.
    """
    try:
        yield
    except (FastAttentionError, OSError, MemoryError, RuntimeError) as error:
        if (reason := reason_of(error)) is None:
            raise
        raise fail(reason) from error


def reason_of(error: BaseException) -> str | None:
    """An error's message to a user; None for our own bugs, and where the output is no longer read."""
    if isinstance(error, FastAttentionError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
        return f"there is not enough memory: {first_line(error) or 'use smaller values'}"
    return f"the system refuses: {error}" if str(error) == "can't start new thread" else None


def first_line(error: BaseException) -> str:
    """The first line of an error's message: libraries add pages of advice."""
    return next(iter(str(error).strip().splitlines()), "")


def check_model_folder(folder: Path) -> None:
    """Raises ArgumentError for a folder without a model."""
    try:
        if not (folder / "config.json").is_file():
            raise ArgumentError(f"model {str(folder)!r} is not a Transformers model folder: it has no config.json")
    except OSError as error:
        raise ArgumentError(f"model {str(folder)!r} cannot be read: {error.strerror}") from error


def usable_devices() -> str:
    """The devices that a model can run on here, as an option takes them, e.g. "cpu or cuda:0"."""
    import torch

    return " or ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])


def check_output_file(output: Path) -> None:
    """Raises ArgumentError, before any work, for a file that could not be written. The file is as it was."""
    try:
        if output.is_dir():
            raise ArgumentError(f"output={str(output)!r} is a folder; name a file")
        if output.exists() and not output.is_file():
            return  # a device or a pipe: opening it may wait
        is_new = not output.exists()
        with output.open("ab"):
            pass
        if is_new:
            output.unlink()
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} cannot be written: {error.strerror}") from error


def fail(message: str) -> typer.Exit:
    """Print what went wrong on standard error; the caller raises the returned exit with status 1."""
    MESSAGES.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    return typer.Exit(1)


def require_extra(extra: str, module: str) -> None:
    """Exit with the command that installs `extra` unless its `module` is there."""
    if importlib.util.find_spec(module) is None:
        raise fail(f"this command needs {module}: pip install '.[{extra}]' in the source tree")


@contextmanager
def status(text: str) -> Iterator[None]:
    """Shows on standard error that work is going on. It takes a thread, so only if that is a terminal."""
    if not MESSAGES.is_terminal:
        yield
        return
    with MESSAGES.status(text):
        yield


def progress_bar() -> Progress:
    """A bar on standard error that disappears when done, so that standard output holds results only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=MESSAGES,
        auto_refresh=MESSAGES.is_terminal,  # it takes a thread, so only on a terminal
        transient=True,
        disable=not MESSAGES.is_terminal,
    )
