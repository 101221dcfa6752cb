"""Result files of benchmarks: what was measured, on which device, by which versions and commit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastattention.cli.console import MESSAGES
from fastattention.cli.machine import describe_machine
from fastattention.files import write_atomically

SCHEMA = 1


def write_record(path: Path, figures: Mapping[str, Any], draw: Callable[[Path], object] | None = None) -> None:
    """Write `figures` by `save_record`, and the picture beside it, and say which files there are.

    draw: writes the picture, named as `path` but for its suffix .png. It needs matplotlib, the plot extra
    """
    save_record(path, figures)
    written = [path]
    if draw is not None and importlib.util.find_spec("matplotlib") is None:
        MESSAGES.print(escape("no picture: it needs matplotlib, pip install '.[plot]' in the source tree"))
    elif draw is not None:
        written.append(path.with_suffix(".png"))
        draw(written[-1])
    for each in written:
        MESSAGES.print(f"wrote {escape(str(each))}", soft_wrap=True)


def save_record(path: Path, figures: Mapping[str, Any]) -> None:
    """Write `figures` as JSON with a description of this machine, into a folder that need not exist.

    figures: may hold a "machine" described earlier or in more detail, and a "question" other than the file's name
    """
    head: dict[str, Any] = {"schema": SCHEMA, "question": path.stem}
    if "machine" not in figures:
        head["machine"] = describe_machine()
    write_atomically(path, (json.dumps(head | dict(figures), indent=1) + "\n").encode())


def title(machine: Mapping[str, Any]) -> str:
    """Device and versions in one line."""
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("fastattention", "torch"))
    return f"{machine['cpu']}, {machine['num_threads']} threads; {versions}"
