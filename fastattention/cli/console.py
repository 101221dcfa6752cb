"""Console output that the commands share: progress bars, and errors without a traceback."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from fastattention.errors import FastAttentionError

# Text from outside (paths, reasons, shapes) may hold square brackets: escape it wherever it meets markup.
OUTPUT = Console(highlight=False)
MESSAGES = Console(stderr=True, highlight=False)


@contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn an exception of the package into one message and exit status 1."""
    try:
        yield
    except FastAttentionError as error:
        raise fail(str(error)) from error


def fail(message: str) -> typer.Exit:
    """Print what went wrong on standard error; the caller raises the returned exit with status 1."""
    MESSAGES.print(f"[bold red]error:[/] {escape(message)}", soft_wrap=True)
    return typer.Exit(1)


def require_extra(extra: str, module: str) -> None:
    """Exit with the command that installs `extra` unless its `module` is there."""
    if importlib.util.find_spec(module) is None:
        raise fail(f"this command needs {module}: pip install '.[{extra}]' in the source tree")


def progress_bar() -> Progress:
    """A bar on standard error that disappears when done, so that standard output holds results only."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=MESSAGES,
        transient=True,
        disable=not MESSAGES.is_terminal,
    )
