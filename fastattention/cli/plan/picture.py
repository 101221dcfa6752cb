"""What the pictures of plans have in common: which files they can be."""

from __future__ import annotations

from pathlib import Path

from fastattention.cli.console import require_extra
from fastattention.errors import ArgumentError

SUFFIXES = (".png", ".svg")


def check_output(path: Path) -> None:
    """Raises ArgumentError for a picture that could not be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"output={str(path)!r} has no suffix of a picture; use {' or '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise ArgumentError(f"output={str(path)!r} cannot be written: its folder does not exist")
    require_extra("plot", "matplotlib")
