"""What the scripts share: where their figures go, how these are shown, and processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.markdown import Markdown

from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT

RESULTS = Path(__file__).parent / "results"


def publish(path: Path, figures: Mapping[str, Any], *blocks: str, draw: Callable[[Path], object] | None = None) -> None:
    """Print `blocks` of Markdown, which a module of pages/ makes of the figures, and write these to `path`.

    draw: as for `write_record`
    """
    show(*blocks)
    write_record(path, figures, draw)


def show(*blocks: str) -> None:
    """Print headings, text and tables in Markdown, which a terminal shows rendered and a file as it is."""
    for block in blocks:
        if OUTPUT.is_terminal:
            OUTPUT.print(Markdown(block))
        else:
            print(block, end="\n\n")


def run_again(script: str, *arguments: str, **environment: str) -> Any:
    """What a script prints as its last line in a process of its own, as JSON; None where it prints nothing."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if lines else None
