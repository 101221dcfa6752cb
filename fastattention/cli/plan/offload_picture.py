"""Plots the predicted time per token over the sequence length, a curve per policy. Needs the plot extra."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastattention.offload.placement import Placement
from fastattention.offload.policy import AUTO, Policy

COLORS = {
    Policy.RESIDENT: "#444444",
    Policy.CLASSICAL: "#c44e52",
    Policy.COOPERATIVE: "#4c72b0",
    Policy.HYBRID: "#55a868",
    Policy.GATHERED: "#8172b2",
}
SHORTEST = 2048
POINTS = 96
BEYOND = 4  # times the length of the plan is drawn when nothing limits it


def write_picture(placement: Placement, placement_of: Callable[[int, str], Placement], path: Path) -> None:
    """Draw up to the longest sequence that fits; the suffix of `path` is .png or .svg."""
    lengths = _lengths(placement)
    placements = [placement_of(seqlen, AUTO) for seqlen in lengths]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    panel = figure.subplots()
    for policy, color in COLORS.items():
        seconds = [one.predictions[policy].seconds for one in placements]
        milliseconds = [np.nan if value is None else 1e3 * value for value in seconds]
        if not np.isnan(milliseconds).all():
            panel.plot(lengths, milliseconds, color=color, label=policy.value, lw=1.6)
    _decorate(panel, placement)
    figure.savefig(path, dpi=110)


def _lengths(placement: Placement) -> list[int]:
    """Equal steps of the logarithm, the plan's own length among them."""
    limits = [one.longest_seqlen for one in placement.predictions.values()]
    known = [limit for limit in limits if limit is not None]
    longest = max(known) if len(known) == len(limits) else max(BEYOND * placement.seqlen, *known)
    steps = np.geomspace(min(SHORTEST, longest), longest, POINTS).astype(int).tolist()
    return sorted({*steps, longest, placement.seqlen})


def _decorate(panel: Axes, placement: Placement) -> None:
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.set_xlabel("tokens of a sequence")
    panel.set_ylabel("predicted ms a token")
    panel.grid(which="both", color="#eeeeee")
    panel.set_axisbelow(True)
    panel.legend()
    workload = f"{placement.model.name} on {placement.hardware.name}, batch {placement.batch_size}"
    panel.set_title(f"{workload}: predicted, not measured", fontsize=10, loc="left")
