"""Plots the timeline of compute and all-reduce, overlapped and sequential. Needs the plot extra."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from fastattention.cli.plan.allreduce_model import Timeline
from fastattention.cli.plan.picture import draw_bar

COLORS = {"compute": "#55a868", "all-reduce": "#c44e52"}


def write_picture(timelines: dict[str, Timeline], heading: str, path: Path) -> None:
    """Draw two lanes of each; bars show the number of their block. The suffix of `path` is .png or .svg."""
    figure = Figure(figsize=(9, 1 + 0.9 * len(timelines)), layout="constrained")
    panel = figure.subplots()
    width = 1e3 * max(timeline.seconds for timeline in timelines.values())
    names: list[str] = []
    for name, timeline in timelines.items():
        for lane, events in (("compute", timeline.compute), ("all-reduce", timeline.communication)):
            for event in events:
                number = str(event.block + 1)
                draw_bar(panel, len(names), 1e3 * event.start, 1e3 * event.end, number, COLORS[lane], width)
            names.append(f"{name}: {lane}")
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, width)
    panel.set_xlabel("predicted milliseconds", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.set_title(f"{heading}: predicted, not measured", fontsize=9, loc="left")
    figure.savefig(path, dpi=110)
