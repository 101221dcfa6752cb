"""BenchReport: measurements and the machine they were taken on, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastattention.cli.bench.measure import Measurement
from fastattention.cli.bench.peaks import NAMES, PeakRates
from fastattention.cli.bench.peers import FASTATTENTION
from fastattention.cli.bench.workload import BenchWorkload

Quantity = Literal["rate", "time"]
NUMBER_WIDTH = 8  # width of a column, so that a narrow terminal wraps names and headings but no number


@dataclass(frozen=True)
class BenchReport:
    """One question, answered on one machine."""

    question: str  # names the files, e.g. "prefill"
    quantity: Quantity  # what the charts show: "time" where a call does next to no arithmetic
    machine: dict[str, Any]
    limits: PeakRates
    peers: dict[str, str]  # name -> version, or why it was not measured
    measurements: list[Measurement]

    def by_workload(self) -> Iterator[tuple[BenchWorkload, list[Measurement]]]:
        """The measurements of each workload, in the order in which they were taken."""
        for workload, group in groupby(self.measurements, key=lambda measurement: measurement.workload):
            yield workload, list(group)

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON types. Seconds, 10^9 operations or bytes a second; fractions of the measured limits."""
        return {
            "machine": self.machine,
            "limits": asdict(self.limits),
            "peers": self.peers,
            "measurements": [self._record(one, group) for _, group in self.by_workload() for one in group],
        }

    def _record(self, one: Measurement, group: list[Measurement]) -> dict[str, Any]:
        return {
            "workload": {"label": one.workload.label, **asdict(one.workload)},
            "peer": one.peer,
            "detail": one.detail,
            "seconds": None if one.timing is None else asdict(one.timing),
            "gflops": one.gflops,
            "gbytes_per_s": one.gbytes_per_s,
            "limit": one.workload.limit,
            "limit_rate": one.limit_rate,
            "fraction_of_limit": fraction_of_limit(one, self.limits),
            "max_error": one.max_error,
            "fastattention_speedup": fastattention_speedup(one, group),
            "reason": one.reason,
        }


def rate(one: Measurement) -> tuple[float | None, str]:
    """The rate that fits the workload, and its unit."""
    return (one.gbytes_per_s, "GB/s") if one.workload.limit == "dram_read" else (one.gflops, "GFLOP/s")


def fraction_of_limit(one: Measurement, limits: PeakRates) -> float | None:
    """Rate over the processor's limit, measured in the same turns if possible; None where either is unknown."""
    limit: float | None = one.limit_rate or getattr(limits, one.workload.limit)
    value, _ = rate(one)
    return None if value is None or limit is None else value / limit


def fastattention_speedup(one: Measurement, group: list[Measurement]) -> float | None:
    """How many times faster fastattention did the same workload; below 1 where it lost. None for itself."""
    ours = next((other.timing for other in group if other.peer == FASTATTENTION.name), None)
    if one.peer == FASTATTENTION.name or ours is None or one.timing is None:
        return None
    return one.timing.median / ours.median


def show(report: BenchReport, console: Console) -> None:
    """Print a table for each workload."""
    for workload, group in report.by_workload():
        console.print(_table(report, workload, group))


def who_is_here(peers: dict[str, str]) -> list[str]:
    """One line for each version or reason, after the names of the peers that share it."""
    names: dict[str, list[str]] = {}
    for name, state in peers.items():
        names.setdefault(state, []).append(name)
    return [f"{', '.join(together)}: {state}" for state, together in names.items()]


def full_name(one: Measurement) -> str:
    """The peer's name and the path that it took."""
    return f"{one.peer} ({one.detail})" if one.detail else one.peer


def in_words(seconds: float) -> str:
    """Seconds with a unit that leaves three digits."""
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _table(report: BenchReport, workload: BenchWorkload, group: list[Measurement]) -> Table:
    """The table of a workload; columns without any value are left out."""
    cells = {
        "time": [_time(one) for one in group],
        rate(group[0])[1]: [_format(rate(one)[0], "{:.3g}") for one in group],
        f"of {NAMES[workload.limit]}": [_format(fraction_of_limit(one, report.limits), "{:.0%}") for one in group],
        "max error": [_format(one.max_error, "{:.1e}") for one in group],
        "our speedup": [_comparison(fastattention_speedup(one, group)) for one in group],
    }
    table = Table(title=workload.label, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("computed by")
    if report.quantity == "time":
        cells = {heading: cells[heading] for heading in ("time", "max error", "our speedup")}
    columns = {heading: column for heading, column in cells.items() if any(column)}
    for heading in columns:
        table.add_column(heading, justify="right", min_width=NUMBER_WIDTH)
    for one, *row in zip(group, *columns.values(), strict=True):
        if one.timing is not None:
            table.add_row(escape(full_name(one)), *row)
    notes = [f"{one.peer}: {one.reason}" for one in group if one.timing is None]
    if any(one.timing is not None and one.timing.calls == 1 for one in group):
        notes.append("* measured once: slower than the time given to this workload")
    table.caption, table.caption_justify = escape("\n".join(notes)), "left"
    return table


def _time(one: Measurement) -> str:
    if one.timing is None:
        return ""
    return in_words(one.timing.median) + ("*" if one.timing.calls == 1 else "")


def _format(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _comparison(speedup: float | None) -> str:
    if speedup is None:
        return ""
    return f"[{'green' if speedup >= 1 else 'red'}]{speedup:.2f}x[/]"
