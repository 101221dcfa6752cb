"""Code that pictures of plans share: file formats, and the bars of timelines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fastattention.cli.console import check_output_file, require_extra
from fastattention.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # an extra, which may be absent when an output is checked

SUFFIXES = (".png", ".svg")
LABELLED = 0.02  # least share of the width of a bar that holds its label


def check_output(path: Path) -> None:
    """Raises ArgumentError for a picture that could not be drawn."""
    if path.suffix.lower() not in SUFFIXES:
        raise ArgumentError(f"output={str(path)!r} has no suffix of a picture; use {' or '.join(SUFFIXES)}")
    check_output_file(path)
    require_extra("plot", "matplotlib")


def draw_bar(panel: Axes, row: int, start: float, end: float, label: str, color: str, width: float) -> None:
    """A bar of a lane with its label in it; `width` is the width of the panel."""
    panel.barh(row, end - start, left=start, height=0.8, color=color, edgecolor="white", lw=0.3)
    if end - start > LABELLED * width:
        panel.text((start + end) / 2, row, label, ha="center", va="center", fontsize=7, color="white")
