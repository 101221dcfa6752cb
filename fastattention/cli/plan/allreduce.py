"""`fastattention plan allreduce`: predicts how much of an all-reduce attention hides, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase

from rich import box
from rich.table import Table
from rich.text import Text

from fastattention.cli.bench.report import in_words
from fastattention.cli.console import OUTPUT
from fastattention.cli.plan.allreduce_model import Choice, Event, Prompt, Timeline, choose
from fastattention.cli.plan.machines import Machine, find_machine
from fastattention.cli.plan.models import find_shape
from fastattention.cli.plan.picture import check_output
from fastattention.distributed.row_partitions import Partition
from fastattention.sizes import format_bytes

NOTE = "Every time is predicted from rates. docs/internals/tensor-parallel-plan.md says which of them were measured."
COLUMNS = 60  # width of the bars
NUMERALS = "123456789" + ascii_lowercase  # labels of blocks
STYLES = {"compute": "green", "all-reduce": "yellow"}


@dataclass(frozen=True)
class AllReduceOptions:
    """The options of the command."""

    model: str
    tp: int
    seqlen: int
    batch_size: int
    hardware: str

    @property
    def prompt(self) -> Prompt:
        """One rank's share of the prompt. Raises ArgumentError, naming the option, for a wrong one."""
        shape = find_shape(self.model).sharded(self.tp)
        return Prompt(
            self.batch_size,
            self.seqlen,
            shape.nheads,
            shape.headdim,
            shape.headdim_v,
            shape.hidden_size,
            shape.dtype_bytes,
            self.tp,
        )

    @property
    def heading(self) -> str:
        """The question in one line."""
        return f"{self.model} on {self.tp} x {self.hardware}, {self.batch_size} x {self.seqlen} tokens"


def plan(options: AllReduceOptions, output: Path | None) -> None:
    """Print blocks, times and bars, and draw them to `output` if given. Raises ArgumentError for a wrong option."""
    if output is not None:
        check_output(output)
    machine, prompt = find_machine(options.hardware, options.tp), options.prompt
    choice = choose(prompt, machine)
    timelines = {"serial": choice.serial.timeline}
    if len(choice.best.partition.rows) > 1:
        timelines["blocks"] = choice.best.timeline
    OUTPUT.print(_summary(choice, machine, prompt, options))
    for name, timeline in timelines.items():
        OUTPUT.print(_bars(name, timeline, choice.serial.seconds))
    OUTPUT.print(_transports(prompt, machine, choice.best.transport))
    if output is not None:
        from fastattention.cli.plan.allreduce_picture import write_picture  # needs an extra

        write_picture(timelines, options.heading, output)
        OUTPUT.print(f"picture: {output}", soft_wrap=True, markup=False)
    OUTPUT.print(NOTE)


def _summary(choice: Choice, machine: Machine, prompt: Prompt, options: AllReduceOptions) -> Table:
    table = Table(title="Plan", title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    best, size = choice.best, format_bytes(prompt.rows * prompt.row_bytes)
    rates = f"attention {machine.attention_rate / 1e12:.4g} TFLOPS, product {machine.projection_rate / 1e12:.4g}"
    slowed = sum(event.end - event.start for event in best.timeline.compute) / choice.compute_seconds - 1
    rows = {
        "call": options.heading,
        "assumed": f"{rates}, a block {in_words(machine.block_seconds)}",
        "compute alone": in_words(choice.compute_seconds),
        "all-reduce alone": f"{in_words(choice.all_reduce_seconds)}, {size} by {best.transport}",
        "blocks": _blocks(best.partition),
        "predicted serial": in_words(choice.serial.seconds),
    }
    if len(best.partition.rows) > 1:
        rows |= {
            "predicted in blocks": f"{in_words(best.seconds)}, {choice.gain:.2f}x",
            "all-reduce": f"{choice.hidden:.0%} hidden, {in_words(choice.exposed_seconds)} exposed",
            "compute": f"{slowed:.0%} longer, for blocks and the all-reduce beside it",
        }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _blocks(partition: Partition) -> str:
    if len(partition.rows) == 1:
        return "1: more would gain too little"
    runs = [(rows, len(list(run))) for rows, run in groupby(partition.rows)]
    sizes = ", ".join(f"{count} x {rows}" if count > 1 else f"{rows}" for rows, count in runs)
    parts = len(partition.attention_rows)
    attention = ("", "; attention of all rows at once")[parts] if parts < 2 else f"; attention in {parts} parts"
    return f"{len(partition.rows)}, of {sizes} rows{attention}"


def _bars(name: str, timeline: Timeline, seconds: float) -> Text:
    """Two lanes of bars, each drawn with the number of its block; `seconds` take the whole width."""
    bars = Text()
    for lane, events in (("compute", timeline.compute), ("all-reduce", timeline.communication)):
        bars.append(f"  {name:6} {lane:10} ")
        bars.append(_lane(events, seconds) + "\n", style=STYLES[lane])
        name = ""
    return bars


def _lane(events: tuple[Event, ...], seconds: float) -> str:
    """One lane of bars. Every block has at least one column, so short ones push later blocks to the right."""
    lane = ""
    for event in events:
        lane = lane.ljust(round(event.start / seconds * COLUMNS))
        lane += NUMERALS[event.block] * max(round(event.end / seconds * COLUMNS) - len(lane), 1)
    return lane


def _transports(prompt: Prompt, machine: Machine, chosen: str) -> Table:
    table = Table(title="Transports, predicted", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("transport")
    for heading in ("serial", "blocks", "time", "gain", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for transport in machine.transports:
        found = choose(prompt, replace(machine, transports=(transport,)))
        blocks = len(found.best.partition.rows)
        times = (in_words(found.serial.seconds), str(blocks), in_words(found.best.seconds))
        shares = (f"{found.gain:.2f}x", f"{found.hidden:.0%}")
        table.add_row(transport.name, *times, *shares, "chosen" if transport.name == chosen else "")
    return table
