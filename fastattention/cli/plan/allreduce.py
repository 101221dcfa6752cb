"""`fastattention plan allreduce`: predicts how much of an all-reduce attention hides, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase

from rich import box
from rich.table import Table
from rich.text import Text

from fastattention.cli.bench.report import in_words
from fastattention.cli.console import OUTPUT
from fastattention.cli.plan.picture import check_output
from fastattention.distributed.costs import ComputeCost, RingCost, TransportCost, Workload
from fastattention.distributed.divisions import Blocks
from fastattention.distributed.machines import Machine, find_machine
from fastattention.distributed.plan import Plan, choose, offer_of
from fastattention.distributed.timeline import Event, Timeline
from fastattention.offload.model_shape import find_model
from fastattention.sizes import format_bytes

NOTE = "Every time is predicted from rates. docs/internals/tensor-parallel-plan.md says which of them were measured."
COLUMNS = 60  # of the bars
NUMERALS = "123456789" + ascii_lowercase  # of blocks
STYLES = {"compute": "green", "all-reduce": "yellow"}


@dataclass(frozen=True)
class Options:
    """What the command is asked."""

    model: str
    tp: int
    seqlen: int
    batch_size: int
    hardware: str

    @property
    def workload(self) -> Workload:
        """A prompt, as one rank has it. Raises ArgumentError, naming the option, for a wrong one."""
        shape = find_model(self.model).sharded(self.tp)
        return Workload(
            self.batch_size,
            self.seqlen,
            self.seqlen,
            shape.nheads,
            shape.nheads_k,
            shape.headdim,
            shape.headdim_v,
            shape.hidden_size,
            shape.dtype_bytes,
            self.tp,
            causal=True,
        )

    @property
    def heading(self) -> str:
        """The question in one line."""
        return f"{self.model} on {self.tp} x {self.hardware}, {self.batch_size} x {self.seqlen} tokens"


class Outcome:
    """A plan of the call, by some of the transports, with what it hides."""

    def __init__(
        self, workload: Workload, compute: ComputeCost, transports: tuple[TransportCost | RingCost, ...]
    ) -> None:
        self.plan: Plan = choose(workload, compute, transports)
        transport = next(one for one in transports if one.name == self.plan.transport)
        offer = offer_of(workload, compute, transport)
        self.timeline: Timeline = offer.timeline(Blocks(self.plan.rows, self.plan.attended))
        self.compute_seconds = compute.seconds
        self.all_reduce_seconds = offer.all_reduce_seconds

    @property
    def exposed_seconds(self) -> float:
        """What the call takes beyond its compute alone."""
        return self.plan.seconds - self.compute_seconds

    @property
    def hidden(self) -> float:
        """The share of the all-reduce, as long as it takes alone, that the call does not wait for."""
        return max(0.0, 1 - self.exposed_seconds / self.all_reduce_seconds)

    @property
    def gain(self) -> float:
        """How many times faster than serial."""
        return self.plan.serial_seconds / self.plan.seconds


def plan(options: Options, output: Path | None) -> None:
    """Print blocks, times and bars, and draw them to `output` if given. Raises ArgumentError for a wrong option."""
    if output is not None:
        check_output(output)
    machine, workload = find_machine(options.hardware, options.tp), options.workload
    compute = machine.compute(workload)
    outcome = Outcome(workload, compute, machine.transports)
    timelines = {"serial": _serial_timeline(workload, compute, machine.transports)}
    if len(outcome.plan.rows) > 1:
        timelines["blocks"] = outcome.timeline
    OUTPUT.print(_summary(outcome, machine, workload, options))
    for name, timeline in timelines.items():
        OUTPUT.print(_bars(name, timeline, outcome.plan.serial_seconds))
    OUTPUT.print(_transports(workload, compute, machine, outcome.plan.transport))
    if output is not None:
        from fastattention.cli.plan.overlap import write_overlap  # needs an extra

        write_overlap(timelines, options.heading, output)
        OUTPUT.print(f"picture: {output}", soft_wrap=True, markup=False)
    OUTPUT.print(NOTE)


def _serial_timeline(
    workload: Workload, compute: ComputeCost, transports: tuple[TransportCost | RingCost, ...]
) -> Timeline:
    """One block, by the fastest transport for it."""
    offers = [offer_of(workload, compute, transport) for transport in transports]
    return min(offers, key=lambda offer: offer.serial_seconds).timeline(Blocks((workload.rows,)))


def _summary(outcome: Outcome, machine: Machine, workload: Workload, options: Options) -> Table:
    table = Table(title="Plan", title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    found, size = outcome.plan, format_bytes(workload.rows * workload.row_bytes)
    rates = f"attention {machine.attention_rate / 1e12:.4g} TFLOPS, product {machine.linear_rate / 1e12:.4g}"
    slowed = outcome.timeline.compute[-1].end / outcome.compute_seconds - 1
    rows = {
        "call": options.heading,
        "assumed": f"{rates}, a block {in_words(machine.block_seconds)}",
        "compute alone": in_words(outcome.compute_seconds),
        "all-reduce alone": f"{in_words(outcome.all_reduce_seconds)}, {size} by {found.transport}",
        "blocks": _blocks(found),
        "predicted serial": in_words(found.serial_seconds),
    }
    if len(found.rows) > 1:
        rows |= {
            "predicted in blocks": f"{in_words(found.seconds)}, {outcome.gain:.2f}x",
            "all-reduce": f"{outcome.hidden:.0%} hidden, {in_words(outcome.exposed_seconds)} exposed",
            "compute": f"{slowed:.0%} longer, for blocks and the all-reduce beside it",
        }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _blocks(found: Plan) -> str:
    if len(found.rows) == 1:
        return "1: more would gain too little"
    runs = [(rows, len(list(run))) for rows, run in groupby(found.rows)]
    sizes = ", ".join(f"{count} x {rows}" if count > 1 else f"{rows}" for rows, count in runs)
    return f"{len(found.rows)}, of {sizes} rows" + _attended(found)


def _attended(found: Plan) -> str:
    """Where attention is not computed block by block."""
    if not found.attended:
        return ""
    return (
        "; attention of all rows at once" if len(found.attended) == 1 else f"; attention in {len(found.attended)} parts"
    )


def _bars(name: str, timeline: Timeline, seconds: float) -> Text:
    """Two lanes of bars, each drawn with the number of its block; `seconds` take the whole width."""
    bars = Text()
    for lane, events in (("compute", timeline.compute), ("all-reduce", timeline.communication)):
        bars.append(f"  {name:6} {lane:10} ")
        bars.append(_lane(events, seconds) + "\n", style=STYLES[lane])
        name = ""
    return bars


def _lane(events: tuple[Event, ...], seconds: float) -> str:
    """Every block has a column at least, so that short ones push those after them to the right."""
    lane = ""
    for event in events:
        lane = lane.ljust(round(event.start / seconds * COLUMNS))
        lane += NUMERALS[event.block] * max(round(event.end / seconds * COLUMNS) - len(lane), 1)
    return lane


def _transports(workload: Workload, compute: ComputeCost, machine: Machine, chosen: str) -> Table:
    table = Table(title="Transports, predicted", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("transport")
    for heading in ("serial", "blocks", "time", "gain", "hidden"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    for transport in machine.transports:
        outcome = Outcome(workload, compute, (transport,))
        found = outcome.plan
        times = (in_words(found.serial_seconds), str(len(found.rows)), in_words(found.seconds))
        shares = (f"{outcome.gain:.2f}x", f"{outcome.hidden:.0%}")
        table.add_row(transport.name, *times, *shares, "chosen" if transport.name == chosen else "")
    return table
