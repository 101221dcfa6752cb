"""Plots the work of each pipe of the Cube and the Vector units in a row block. Needs the plot extra."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.core import WHAT_PIPES_DO
from fastattention.backends.ascend.simulator.events import Operation
from fastattention.backends.ascend.simulator.tiles import Tiling
from fastattention.cli.plan.picture import draw_bar

COLORS = {
    "queries": "#937860",
    "QK": "#4c72b0",
    "softmax": "#55a868",
    "PV": "#c44e52",
    "O update": "#8172b3",
    "result": "#ccb974",
    "flag": "#444444",
}
PIPES = list(WHAT_PIPES_DO)
MERGED_GAP = 1.0  # cycles: slices that follow each other so closely are drawn as one bar


def write_picture(
    operations: list[Operation], tiling: Tiling, chip: Chip, heading: str, path: Path, cycles: float
) -> None:
    """Draw the first `cycles` of a row block; the suffix of `path` is .png or .svg."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panel = figure.subplots()
    for row, pipe in enumerate(PIPES):
        _draw(panel, row, [one for one in operations if (one.unit, one.pipe) == pipe], chip, cycles)
    names = [f"{unit} {pipe}: {does}" for (unit, pipe), does in WHAT_PIPES_DO.items()]
    panel.set_yticks(range(len(PIPES)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, cycles / chip.clock_hz * 1e6)
    panel.set_xlabel("predicted microseconds since the row block began", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.set_title(f"{heading}\n{in_words(tiling)}; {chip.name}, predicted, one core", fontsize=9, loc="left")
    handles = [Patch(color=color, label=stage) for stage, color in COLORS.items()]
    panel.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(handles), fontsize=8)
    figure.savefig(path, dpi=110)


def in_words(tiling: Tiling) -> str:
    """A tiling in one line."""
    return (
        f"tiles {tiling.outer_tile_m} x {tiling.outer_tile_n}, Vector slices of {tiling.inner_tile_m} rows, "
        f"score tiles computed ahead: {tiling.preload - 1}"
    )


def _draw(panel: Axes, row: int, operations: list[Operation], chip: Chip, cycles: float) -> None:
    scale = 1e6 / chip.clock_hz
    for stage, tile, start, end in _bars(operations):
        if start >= cycles:
            continue
        shown = min(end, cycles)
        draw_bar(panel, row, start * scale, shown * scale, str(tile), COLORS[stage], cycles * scale)


def _bars(operations: list[Operation]) -> list[tuple[str, int, float, float]]:
    """Stage, tile, start and end of what a pipe does without a gap."""
    bars: list[tuple[str, int, float, float]] = []
    for one in operations:
        if bars and bars[-1][:2] == (one.stage, one.tile) and one.start - bars[-1][3] <= MERGED_GAP:
            bars[-1] = (*bars[-1][:3], one.end)
        else:
            bars.append((one.stage, one.tile, one.start, one.end))
    return bars
