"""Results of tiled_allreduce.py, as tables."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.table import Table

from fastattention.cli.console import OUTPUT


def show(rows: list[dict[str, Any]]) -> None:
    """A table for each case and kind: milliseconds, times as fast as serial, the share of the all-reduce hidden."""
    for row in rows:
        for kind, seconds in row["seconds"].items():
            _show_kind(row, kind, seconds)
        for name, reason in row["refused"].items():
            OUTPUT.print(f"{name}: {reason}", markup=False)


def _show_kind(row: dict[str, Any], kind: str, seconds: dict[str, float]) -> None:
    table = _table(_title(row, kind), ("", "ms", "speedup", "hidden", "transport", "rows"))
    figures = row["derived"][kind]
    for name, taken in seconds.items():
        cells = [name, _milliseconds(taken)]
        if name in figures["speedup"]:
            cells.append(f"{figures['speedup'][name]:.2f}")
        if name in figures["hidden"]:
            plan = row["plans"][name][kind]
            cells += [f"{figures['hidden'][name]:.0%}", plan["transport"], " ".join(_runs(plan["rows"]))]
        table.add_row(*cells)
    table.add_row("max(compute, all-reduce)", _milliseconds(figures["bound"]))
    OUTPUT.print(table)


def show_traces(rows: list[dict[str, Any]]) -> None:
    """Prints the same tables of traces, where there are any: milliseconds of rank 0."""
    for row in rows:
        for kind, found in row.get("trace", {}).items():
            title = f"{_title(row, kind)}, traced"
            headings = ("", "whole", "compute", "communication", "exposed", "hidden", "compute longer by")
            table = _table(title, headings)
            for name, one in found.items():
                times = [_milliseconds(one[part]) for part in ("whole", "compute", "communication", "exposed")]
                table.add_row(name, *times, f"{one['hidden']:.0%}", f"{one['inflation']:.0%}")
            OUTPUT.print(table)


def _title(row: dict[str, Any], kind: str) -> str:
    lengths = (
        f"S{row['seqlen_q']}" if row["seqlen_q"] == row["seqlen_k"] else f"S{row['seqlen_q']} on {row['seqlen_k']}"
    )
    return f"{row['model']} B{row['batch_size']} {lengths}, {kind}"


def _table(title: str, headings: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "transport", "rows") else "right")
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def _runs(rows: list[int]) -> Iterator[str]:
    """Runs of equal blocks, for example 2048x3."""
    for count, blocks in groupby(rows):
        times = len(list(blocks))
        yield f"{count}x{times}" if times > 1 else str(count)
