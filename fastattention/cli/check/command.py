"""`fastattention check`: runs the list on this machine's device, and writes the report to send back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import typer
from rich.markup import escape
from rich.table import Table

from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.cli.check import model, run, speeds
from fastattention.cli.check.cases import Check, checks_of
from fastattention.cli.check.facts import facts_of
from fastattention.cli.check.report import CheckReport, Entry
from fastattention.cli.console import MESSAGES, OUTPUT, check_output_file, progress_bar
from fastattention.errors import ArgumentError, UnsupportedError

BACKENDS = {"npu": "ascend", "cuda": "cuda", "cpu": "cpu"}


def check(device: str | None, output: Path, checks: Sequence[Check] | None = None) -> None:
    """Run everything, write `output`, print what was wrong. Exits with status 1 if anything was wrong or failed.

    device: npu, cuda or cpu; None for the machine's. checks: others than the list. Raises UnsupportedError where the
    device's backend cannot run.
    """
    check_output_file(output)
    if output.exists() and not output.is_file():
        raise ArgumentError(f"output={str(output)!r} is no regular file; name one, which is replaced as a whole")
    device = device or device_of_machine()
    if (reason := ATTENTION_BACKENDS.get(BACKENDS[device]).why_unavailable()) is not None:
        raise UnsupportedError(f"device={device!r}: the {BACKENDS[device]} backend cannot run here: {reason}")
    report = CheckReport(output, facts_of(device))
    MESSAGES.print(
        escape(f"writing {output} after every call: should this end early, it is worth sending"), soft_wrap=True
    )
    runs = run.runs_of(checks_of(device) if checks is None else checks, run.IMPLEMENTATIONS[device])
    with progress_bar() as bar:
        task = bar.add_task("calls", total=len(runs) + 4)
        for one, implementation in runs:
            bar.update(task, description=f"{one.case.name}, {implementation.name}")
            if not run.run(report, one, implementation, device):
                break
            bar.advance(task)
        else:
            bar.update(task, description="a tiny model")
            model.run(report, device)
            bar.advance(task)
            bar.update(task, description="speed")
            speeds.run(report, device, lambda: bar.advance(task))
    report.finish()
    _show(report)
    if report.bad() or report.stopped:
        raise typer.Exit(1)


def device_of_machine() -> str:
    """The accelerator if we have kernels for it, else cpu."""
    if ATTENTION_BACKENDS.get("ascend").why_unavailable() is None:
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _show(report: CheckReport) -> None:
    if report.bad():
        table = Table("what", "dtype", "by", "state", "why", title="what was wrong", title_justify="left")
        for entry in report.bad():
            by = entry.get("implementation", "")
            cells = (entry["name"], entry.get("dtype", ""), by, entry["state"], _why(entry))
            table.add_row(*(escape(cell) for cell in cells))
        OUTPUT.print(table)
    _show_speeds([entry for entry in report.entries if entry["state"] == "measured"])
    for entry in report.entries:
        if entry["state"] == "skipped":
            OUTPUT.print(escape(f"{entry['name']} skipped: {entry['reason']}"), soft_wrap=True)
    if report.stopped:
        OUTPUT.print(escape(report.stopped), soft_wrap=True)
    OUTPUT.print(report.summary())
    OUTPUT.print(escape(f"wrote {report.path}. Please open an issue with it, whatever it says."), soft_wrap=True)


def _why(entry: Entry) -> str:
    """The reason of a bad entry, and its errors beyond the allowed ones."""
    beyond = {name: one for name, one in entry.get("errors", {}).items() if not one["error"] <= one["allowed"]}
    parts = [f"{name} is off by {one['error']:.2g}, allowed are {one['allowed']:.2g}" for name, one in beyond.items()]
    return "; ".join([*parts, *([str(entry["reason"])] if "reason" in entry else [])])


def _show_speeds(entries: Sequence[Entry]) -> None:
    if not entries:
        return
    names = list(dict.fromkeys(name for entry in entries for name in entry["tflops"]))
    table = Table("what", "headdim", "causal", *names, title="useful TFLOPS", title_justify="left")
    if any("predicted_tflops" in entry for entry in entries):
        table.add_column("ours, predicted")
    for entry in entries:
        rates = [f"{entry['tflops'][name]:.3g}" if name in entry["tflops"] else "" for name in names]
        rates += [f"{rate:.3g}" for rate in entry.get("predicted_tflops", {}).values()]
        table.add_row(entry["name"], str(entry["headdim"]), "yes" if entry["causal"] else "no", *rates)
    OUTPUT.print(table)
