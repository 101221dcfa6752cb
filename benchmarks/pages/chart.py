"""Bars of ratios on a logarithmic axis, gains to the right and losses to the left, as SVG.

It is written as text, without a plotting library, so that it has the same bytes on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, MARGIN = 800, 24
PLOT_BEGIN, PLOT_END = 318, 730  # pixels from the left
ROW, BAR, GROUP_HEADING, GROUP_GAP = 26, 16, 30, 12  # pixels of height
PLOT_TOP, NOTE_LINE = 106, 18
GAIN, LOSS, INK, FAINT, GRID = "#1f7a8c", "#d1603d", "#1f2933", "#66737f", "#e4e8eb"
FONTS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"


@dataclass(frozen=True)
class Bar:
    """One comparison; `faint` ends its label, in grey."""

    label: str
    faint: str
    ratio: float


@dataclass(frozen=True)
class Group:
    """Comparisons under one heading, which ends with `faint` in grey."""

    heading: str
    faint: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Chart:
    """A whole picture. ticks: ratios on the axis, from the lowest to the highest, with 1 among them."""

    title: str
    subtitle: str
    ticks: Sequence[float]
    groups: Sequence[Group]
    notes: Sequence[str]

    def svg(self) -> str:
        """The picture."""
        heights = [GROUP_HEADING + ROW * len(group.bars) + GROUP_GAP for group in self.groups]
        bottom = PLOT_TOP + sum(heights)
        height = bottom + NOTE_LINE * len(self.notes) + 22
        parts = self._axis(bottom)
        top = PLOT_TOP
        for group, group_height in zip(self.groups, heights, strict=True):
            parts += self._group(group, top)
            top += group_height
        parts += [
            text(MARGIN, bottom + 18 + NOTE_LINE * line, note, 12.5, FAINT) for line, note in enumerate(self.notes)
        ]
        return picture(self.title, self.subtitle, height, parts)

    def _x(self, ratio: float) -> float:
        lowest, highest = self.ticks[0], self.ticks[-1]
        return PLOT_BEGIN + (PLOT_END - PLOT_BEGIN) * math.log(ratio / lowest) / math.log(highest / lowest)

    def _axis(self, bottom: int) -> list[str]:
        one = self._x(1.0)
        parts = [
            text(one - 8, PLOT_TOP - 25, "slower", 12, LOSS, "600", "end"),
            text(one + 8, PLOT_TOP - 25, "faster", 12, GAIN, "600"),
        ]
        for tick in self.ticks:
            colour, width = (INK, 1.5) if tick == 1 else (GRID, 1)
            x = self._x(tick)
            parts.append(f'<path d="M{x:.1f} {PLOT_TOP}V{bottom}" stroke="{colour}" stroke-width="{width}"/>')
            parts.append(text(x, PLOT_TOP - 7, f"{tick:g}x", 12, INK if tick == 1 else FAINT, anchor="middle"))
        return parts

    def _group(self, group: Group, top: int) -> list[str]:
        parts = [
            # A white box keeps the grid from running through the heading.
            f'<rect x="{MARGIN}" y="{top + 4}" width="{WIDTH - 2 * MARGIN}" height="22" fill="#ffffff"/>',
            text(MARGIN, top + 20, group.heading, 14, INK, "600", end=group.faint),
        ]
        for index, bar in enumerate(group.bars):
            y = top + GROUP_HEADING + ROW * index
            begin, end = sorted((self._x(1.0), self._x(bar.ratio)))
            gained = bar.ratio >= 0.995
            colour = GAIN if gained else LOSS
            number = f"{bar.ratio:.2f}x" if bar.ratio < 10 else f"{bar.ratio:.1f}x"
            at, anchor = (end + 6, "start") if gained else (begin - 6, "end")
            parts += [
                text(MARGIN + 12, y + 13, bar.label, 13.5, INK, end=bar.faint),
                f'<rect x="{begin:.1f}" y="{y}" width="{max(end - begin, 2.0):.1f}" height="{BAR}" rx="2" '
                f'fill="{colour}"/>',
                text(at, y + 13, number, 13.5, colour, "600", anchor),
            ]
        return parts


def picture(title: str, subtitle: str, height: int, parts: Sequence[str]) -> str:
    """An SVG with these parts under a title."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="{escape(FONTS)}">',
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#ffffff"/>',
        text(MARGIN, 38, title, 20, INK, "600"),
        text(MARGIN, 61, subtitle, 13.5, FAINT),
    )
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def text(
    x: float, y: float, text: str, size: float, fill: str, weight: str = "400", anchor: str = "start", end: str = ""
) -> str:
    """A line of text. end: in grey, after it."""
    style = f'font-size="{size:g}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}"'
    faint = f'<tspan dx="7" fill="{FAINT}" font-weight="400" font-size="12.5">{escape(end)}</tspan>' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}{faint}</text>'
