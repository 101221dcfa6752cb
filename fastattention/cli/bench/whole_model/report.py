"""Tables, JSON and the chart of whole models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fastattention.cli.bench.whole_model.measure import ATTENTIONS, OURS, Cell, Effort, Figures

# Columns: a heading, the figure, and the tokens of a sequence that its seconds are for (None: all of the prompt).
RATES: dict[str, tuple[str, int | None]] = {
    "prefill": ("prefill, tokens/s", None),
    "decode": ("decode, tokens/s", 1),
    "graphed_decode": ("decode in a CUDA graph, tokens/s", 1),
}


@dataclass(frozen=True)
class Row:
    """The figures of a cell."""

    cell: Cell
    figures: dict[str, Figures]

    def rate(self, what: str, attention: str) -> float | None:
        """Tokens a second of all sequences together, in the median round."""
        seconds = self.figures[attention].steady(what)
        _, tokens = RATES[what]
        return None if seconds is None else self.cell.batch_size * (tokens or self.cell.seqlen) / seconds


@dataclass(frozen=True)
class ModelReport:
    """One model on one machine."""

    model: str
    num_layers: int
    dtype: str
    effort: Effort
    machine: dict[str, Any]
    rows: Sequence[Row]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types: seconds and bytes, by batch, length and attention."""
        rows = [
            {**row.cell._asdict(), "figures": {name: asdict(found) for name, found in row.figures.items()}}
            for row in self.rows
        ]
        head = {"question": "model", "model": self.model, "num_layers": self.num_layers, "dtype": self.dtype}
        return {**head, **self.effort._asdict(), "machine": self.machine, "rows": rows}

    def tables(self) -> list[Table]:
        """Rates and peak memory. In brackets, our rate relative to each: above 1, ours is faster."""
        tables = [
            self._table(heading, lambda row, name, what=what: _rate(row, what, name))  # type: ignore[misc]
            for what, (heading, _) in RATES.items()
            if any(getattr(found, what) or what in found.refused for row in self.rows for found in row.figures.values())
        ]
        return [*tables, self._table("peak memory of a prefill, GB", _peak)]

    def _table(self, heading: str, cell_of: Callable[[Row, str], str]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, title=heading, title_justify="left")
        table.add_column("batch x tokens")
        for name in ATTENTIONS:
            table.add_column(name, justify="right")
        for row in self.rows:
            cells = [cell_of(row, name) for name in ATTENTIONS]
            table.add_row(f"{row.cell.batch_size} x {row.cell.seqlen}", *cells)
        return table


def _rate(row: Row, what: str, name: str) -> str:
    rate, ours = row.rate(what, name), row.rate(what, OURS)
    if rate is None:
        refused = row.figures[name].refused
        return refused.get(what) or refused.get("prefill") or ""
    ratio = "" if name == OURS or ours is None else f" ({ours / rate:.2f})"
    return f"{rate:,.0f}{ratio}" if rate >= 100 else f"{rate:.3g}{ratio}"


def _peak(row: Row, name: str) -> str:
    peak = row.figures[name].peak_bytes
    return row.figures[name].refused.get("prefill", "") if peak is None else f"{peak / 1e9:.2f}"


def write_png(report: ModelReport, path: Path) -> None:
    """Bars of prefill and decode by batch and length, a panel each. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [what for what in RATES if any(row.rate(what, OURS) is not None for row in report.rows)]
    figure, panels = pyplot.subplots(len(shown), 1, figsize=(9, 3.2 * len(shown)), layout="constrained", squeeze=False)
    device = (report.machine["gpus"] or [report.machine["cpu"]])[0]
    figure.suptitle(f"{report.model}, {report.num_layers} layers, {report.dtype}: {device}", fontsize=11)
    for panel, what in zip(panels[:, 0], shown, strict=True):
        for place, name in enumerate(ATTENTIONS):
            rates = [row.rate(what, name) or 0.0 for row in report.rows]
            positions = [index + 0.27 * (place - 1) for index in range(len(rates))]
            panel.bar(positions, rates, width=0.25, label=name)
            for position, rate in zip(positions, rates, strict=True):
                if not rate:
                    panel.text(position, 0, " none", rotation=90, ha="center", va="bottom", fontsize=6)
        panel.set_xticks(range(len(report.rows)), [f"{row.cell.batch_size} x {row.cell.seqlen}" for row in report.rows])
        panel.tick_params(labelsize=7)
        panel.set_ylabel(RATES[what][0], fontsize=8)
    panels[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
