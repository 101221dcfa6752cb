"""Tables and numbers in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOTE = "Do not edit: `python benchmarks/pages` writes this page from benchmarks/results."


def page(title: str, *blocks: str) -> str:
    """A whole page."""
    return "\n\n".join([f"<!-- {NOTE} -->", f"# {title}", *blocks]) + "\n"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """The first `text_columns` are aligned to the left, numbers to the right."""
    rules = ["---"] * text_columns + ["--:"] * (len(headings) - text_columns)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows))


def ratio(value: float | None) -> str:
    """How many times as fast, in bold where we lose; a dash where there is nothing to compare."""
    if value is None:
        return "-"
    text = f"{value:.2f}x" if value < 10 else f"{value:.0f}x"
    return f"**{text}**" if value < 0.995 else text


def number(value: float, digits: int = 3) -> str:
    """Rounded to so many digits, with no exponent: 1234, 12.3, 0.123."""
    if value == 0:
        return "0"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if magnitude:
        return f"{value:.{max(digits - magnitude, 0)}f}"
    return f"{value:.{digits}g}"


def seconds(value: float) -> str:
    """With the unit that leaves three digits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{number(value * factor)} {unit}"
    return f"{number(value)} s"


def percent(value: float) -> str:
    """A share."""
    return f"{value:.0%}"


def tokens(count: int) -> str:
    """128K for 131072."""
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)
