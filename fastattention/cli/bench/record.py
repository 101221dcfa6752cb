"""Result files of benchmarks: what was measured, on which device, by which versions and commit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastattention.cli.console import MESSAGES
from fastattention.cli.machine import describe_machine
from fastattention.files import write_atomically

SCHEMA = 1


def write_record(path: Path, figures: Mapping[str, Any]) -> None:
    """Write `figures` as JSON with a description of this machine, into a folder that need not exist.

    figures: may hold a "machine" described earlier or in more detail, and a "question" other than the file's name
    """
    head: dict[str, Any] = {"schema": SCHEMA, "question": path.stem}
    if "machine" not in figures:
        head["machine"] = describe_machine()
    record = head | dict(figures)
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    MESSAGES.print(escape(f"wrote {path}: {title(record['machine'])}"), soft_wrap=True)


def title(machine: Mapping[str, Any]) -> str:
    """Device and versions in one line."""
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("fastattention", "torch"))
    return f"{machine['cpu']}, {machine['num_threads']} threads; {versions}"
