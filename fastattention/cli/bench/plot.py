"""Bar charts of measurements, losses included. Needs the plot extra."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastattention.cli.bench.measure import Measurement
from fastattention.cli.bench.record import title
from fastattention.cli.bench.report import BenchReport, fraction_of_limit, full_name, in_words, rate, who_is_here
from fastattention.cli.bench.workload import BenchWorkload

OURS, OTHERS = "#c44e52", ("#4c72b0", "#8172b3", "#937860", "#55a868", "#64b5cd", "#8c8c8c", "#ccb974", "#da8bc3")
BAR_INCHES = 0.24


def write_png(report: BenchReport, path: Path) -> None:
    """Draw one panel a workload."""
    panels = list(report.by_workload())
    columns = 2 if len(panels) > 3 else 1
    rows = -(-len(panels) // columns)
    most_bars = max(len(group) for _, group in panels)
    figure = Figure(figsize=(8.5 * columns, 1.5 + rows * (0.6 + BAR_INCHES * most_bars)), layout="constrained")
    figure.suptitle(f"{report.question}: {title(report.machine)}", fontsize=11)
    figure.supxlabel("\n".join(who_is_here(report.peers)), fontsize=7)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (workload, group) in zip(axes, panels, strict=False):
        _draw(panel, report, workload, group)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    figure.savefig(path, dpi=110)


def _draw(panel: Axes, report: BenchReport, workload: BenchWorkload, group: list[Measurement]) -> None:
    colors, names = [OURS, *OTHERS], list(report.peers)
    values = [_value(report, one) for one in group]
    positions = range(len(group))
    panel.barh(positions, values, color=[colors[names.index(one.peer) % len(colors)] for one in group])
    for position, one, value in zip(positions, group, values, strict=True):
        panel.text(value, position, " " + _text(report, one), va="center", fontsize=7)
    panel.set_yticks(positions, [full_name(one) for one in group], fontsize=7)
    panel.invert_yaxis()
    panel.set_xlim(0, (max(values) or 1.0) * 1.35)  # room for the labels
    panel.tick_params(axis="x", labelsize=7)
    unit = (
        "microseconds a call, less is better" if report.quantity == "time" else f"{rate(group[0])[1]}, more is better"
    )
    panel.set_title(f"{workload.label} ({unit})", fontsize=8, loc="left")


def _value(report: BenchReport, one: Measurement) -> float:
    if one.timing is None:
        return 0.0
    return one.timing.median * 1e6 if report.quantity == "time" else rate(one)[0] or 0.0


def _text(report: BenchReport, one: Measurement) -> str:
    if one.timing is None:
        return one.reason or ""
    if report.quantity == "time":
        return in_words(one.timing.median)
    value, _ = rate(one)
    fraction = fraction_of_limit(one, report.limits)
    of_limit = "" if fraction is None else f" ({fraction:.0%})"
    return f"{value:.3g}{of_limit}, {in_words(one.timing.median)}"
