"""The table of what rules of scores cost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .markdown import ratio, seconds, table

GRADIENTS = " with gradients"


def times(records: list[dict[str, Any]]) -> str:
    """By head dimension and rule, forward and with gradients."""
    headings = [
        "headdim, rule", "forward", "/ plain", "FlexAttention / ours", "with gradients", "/ plain",
        "FlexAttention / ours",
    ]  # fmt: skip
    return table(headings, [row for record in records for row in _rows(record)])


def _rows(record: dict[str, Any]) -> Iterable[list[str]]:
    taken: dict[str, float] = record["seconds"]
    rules = [name.removeprefix("ours ") for name in taken if name.startswith("ours ") and not name.endswith(GRADIENTS)]
    for rule in rules:
        cells = [f"{record['headdim']}, {rule}"]
        for suffix in ("", GRADIENTS):
            ours, flex = taken[f"ours {rule}{suffix}"], taken.get(f"flex {rule}{suffix}")
            # A window has less work than the plain call: its rules are compared with the window alone.
            plain = taken[f"ours {'window' if 'window' in rule else 'plain'}{suffix}"]
            cells += [seconds(ours), f"{ours / plain:.2f}", "-" if flex is None else ratio(flex / ours)]
        yield cells
