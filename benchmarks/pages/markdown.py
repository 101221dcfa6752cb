"""Tables and numbers in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NOTE = "Do not edit: `python benchmarks/pages` writes this page from benchmarks/results."


def page(title: str, *blocks: str) -> str:
    """A whole page."""
    return "\n\n".join([f"<!-- {NOTE} -->", f"# {title}", *blocks]) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table whose first `text_columns` are aligned to the left, others to the right."""
    rules = ["---"] * text_columns + ["--:"] * (len(headings) - text_columns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows))


def ratio(value: float | None) -> str:
    """How many times as fast, in bold where we lose; a dash where there is nothing to compare."""
    if value is None:
        return "-"
    text = f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
    return f"**{text}**" if value < 0.995 else text


def number(value: float, digits: int = 3) -> str:
    """A number rounded to `digits` digits, without an exponent: 1234, 12.3, 0.120."""
    rounded = float(f"{value:.{digits - 1}e}")  # rounded first, because 0.9999 would have a digit more than 1.00
    decimals = digits - 1 - math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{value:.{max(decimals, 0)}f}"


def seconds(value: float) -> str:
    """A time in the unit that gives three digits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{number(value * factor)} {unit}"
    return f"{number(value)} s"


def percent(value: float | None) -> str:
    """A share in per cent; a dash for None."""
    return "-" if value is None else f"{value:.0%}"


def error(value: float) -> str:
    """A signed share, to a tenth of a per cent."""
    return f"{round(value, 3) + 0.0:+.1%}"


def tokens(count: int) -> str:
    """128K for 131072, 1M for 1048576."""
    if count >= 1 << 20 and count % (1 << 20) == 0:
        return f"{count >> 20}M"
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)
