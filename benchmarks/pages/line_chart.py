"""Rates by length: panels side by side, a line for each kernel, as SVG.

It is written as text, without a plotting library, so that it has the same bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .chart import FAINT, GRID, INK, MARGIN, WIDTH, picture, text

PLOT_TOP, PLOT_HEIGHT, AXIS_HEIGHT, LEGEND_HEIGHT = 128, 200, 46, 24
GAP, LABELS = 26, 34  # pixels between panels, and for the labels of the vertical axis


@dataclass(frozen=True)
class Style:
    """How the line of a kernel looks."""

    colour: str
    ours: bool = False  # thicker, with dots
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Rates under one heading. rates: of each kernel, one for each label of the horizontal axis."""

    heading: str
    labels: Sequence[str]
    rates: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class LineChart:
    """A whole picture. styles: by kernel, in the legend's order; step: between two lines of the vertical axis."""

    title: str
    subtitle: str
    axis: str  # what the horizontal axis counts
    step: float
    styles: Mapping[str, Style]
    panels: Sequence[Panel]

    def svg(self) -> str:
        """The picture."""
        height = PLOT_TOP + PLOT_HEIGHT + AXIS_HEIGHT
        parts = self._legend()
        width = (WIDTH - 2 * MARGIN - LABELS - GAP * (len(self.panels) - 1)) / len(self.panels)
        for index, panel in enumerate(self.panels):
            parts += self._panel(panel, MARGIN + LABELS + index * (width + GAP), width, index == 0)
        return picture(self.title, self.subtitle, height, parts)

    def _legend(self) -> list[str]:
        parts, x = [], float(MARGIN)
        for name, style in self.styles.items():
            parts.append(_line([(x, 80), (x + 22, 80)], style))
            parts.append(text(x + 28, 84.5, name, 12.5, INK, "600" if style.ours else "400"))
            x += 48 + (7.7 if style.ours else 6.9) * len(name)
        return parts

    def _panel(self, panel: Panel, left: float, width: float, first: bool) -> list[str]:
        bottom = PLOT_TOP + PLOT_HEIGHT
        highest = max(max(rates) for one in self.panels for rates in one.rates.values())
        lines = int(highest / self.step) + 1
        scale = PLOT_HEIGHT / (lines * self.step)
        inset = width / (2 * len(panel.labels))
        places = [left + inset + index * 2 * inset for index in range(len(panel.labels))]
        parts = [text(left, PLOT_TOP - 12, panel.heading, 13.5, INK, "600")]
        for index in range(lines + 1):
            y = bottom - index * self.step * scale
            parts.append(f'<path d="M{left:.1f} {y:.1f}h{width:.1f}" stroke="{GRID if index else INK}"/>')
            if first:
                parts.append(text(left - 6, y + 4, f"{index * self.step:g}", 12, FAINT, anchor="end"))
        for label, x in zip(panel.labels, places, strict=True):
            parts.append(text(x, bottom + 17, label, 12, FAINT, anchor="middle"))
        parts.append(text(left + width / 2, bottom + 35, self.axis, 12, FAINT, anchor="middle"))
        for name, style in reversed(list(self.styles.items())):  # ours come first in the legend, and on top
            if name in panel.rates:
                points = [(x, bottom - rate * scale) for x, rate in zip(places, panel.rates[name], strict=True)]
                parts.append(_line(points, style))
        return parts


def _line(points: Sequence[tuple[float, float]], style: Style) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    width, dashes = (3 if style.ours else 1.8), ' stroke-dasharray="5 4"' if style.dashed else ""
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{style.colour}"/>' for x, y in points if style.ours]
    line = f'<polyline points="{path}" fill="none" stroke="{style.colour}" stroke-width="{width}"{dashes}/>'
    return "\n".join([line, *dots])
