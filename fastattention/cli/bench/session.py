"""Runs questions: every workload under a progress bar, then tables, JSON and a chart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from fastattention.cli.bench.measure import Measurement, measure
from fastattention.cli.bench.peaks import NAMES, PeakRates, measure_limits
from fastattention.cli.bench.peers import ALL_PEERS, Peer
from fastattention.cli.bench.record import title, write_record
from fastattention.cli.bench.report import BenchReport, Quantity, show, who_is_here
from fastattention.cli.bench.workload import BenchWorkload
from fastattention.cli.console import OUTPUT, progress_bar, status
from fastattention.cli.machine import describe_machine


@dataclass(frozen=True)
class Session:
    """The machine, its limits and the peers, which all questions of one run share."""

    machine: dict[str, Any]
    limits: PeakRates


def run_question(question: str, workloads: list[BenchWorkload], seconds: float, directory: Path) -> None:
    """Answer and publish a single question."""
    session = start_session()
    show_header(session)
    publish(answer(session, question, workloads, seconds), directory)


def start_session() -> Session:
    """Describe the machine and measure its limits, a second or so."""
    with status("measuring what this processor can do"):
        return Session(describe_machine(), measure_limits())


def show_header(session: Session) -> None:
    """Print the machine, its measured limits and the peers."""
    machine, limits = session.machine, session.limits
    OUTPUT.print(f"[bold]{escape(title(machine))}[/]")
    if limits.reason is not None:
        OUTPUT.print(escape(limits.reason))
    for name, words in NAMES.items():
        value = getattr(limits, name)
        if value is not None:
            OUTPUT.print(f"measured {words}: {value:.0f} {'GB/s' if name == 'dram_read' else 'GFLOP/s'}")
    for line in who_is_here({peer.name: _state(peer) for peer in ALL_PEERS}):
        OUTPUT.print(escape(line))
    if machine["gpus"]:
        OUTPUT.print(f"{escape(', '.join(machine['gpus']))}: not measured, this benchmark runs on the CPU only")


def answer(session: Session, question: str, workloads: list[BenchWorkload], seconds: float) -> BenchReport:
    """Measure `workloads`, each for about `seconds`, with every available peer."""
    peers = [peer for peer in ALL_PEERS if any(peer.applies_to(workload) for workload in workloads)]
    available = [peer for peer in peers if peer.why_unavailable() is None]
    measurements: list[Measurement] = []
    with progress_bar() as bar:
        task = bar.add_task(question, total=len(workloads))
        for index, workload in enumerate(workloads):
            bar.update(task, description=escape(workload.label), completed=index)

            def on_progress(fraction: float, done: int = index) -> None:
                bar.update(task, completed=done + fraction)

            measurements += measure(workload, available, seconds, on_progress)
    # The chart of calls that do next to no arithmetic shows their time.
    quantity: Quantity = "time" if all(workload.flops < 1e6 for workload in workloads) else "rate"
    return BenchReport(
        question, quantity, session.machine, session.limits, {peer.name: _state(peer) for peer in peers}, measurements
    )


def publish(report: BenchReport, directory: Path) -> None:
    """Print the tables; write QUESTION.json and, with the plot extra, QUESTION.png into `directory`."""
    show(report, OUTPUT)

    def draw(path: Path) -> None:
        from fastattention.cli.bench.plot import write_png

        write_png(report, path)

    write_record(directory / f"{report.question}.json", report.to_json(), draw)


def _state(peer: Peer) -> str:
    """The peer's version, or why it is not available."""
    return peer.why_unavailable() or peer.version()
