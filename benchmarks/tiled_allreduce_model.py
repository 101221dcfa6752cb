"""Does the model of blocks predict what was measured?

    python benchmarks/tiled_allreduce_model.py

It reads results of tiled_allreduce.py, and predicts what the blocks that ran there take in CUDA graphs: from the
compute that was measured beside them, and from the transports of the h200 preset among as many ranks. No device is
needed. Of blocks with attention of several at once there is a model by ring_product alone; others are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fastattention.cli.console import OUTPUT
from fastattention.distributed.costs import ComputeCost, RingCost, Workload
from fastattention.distributed.divisions import Blocks
from fastattention.distributed.machines import find_machine
from fastattention.distributed.plan import offer_of

RESULTS = Path(__file__).parent / "results"
FILES = [RESULTS / "tiled_allreduce_tp2.json", RESULTS / "tiled_allreduce_tp2_heads_of_4.json"]
MODELS = {"7B": (4096, 32, 32), "70B": (8192, 64, 8)}  # hidden, nheads, nheads_k
HEADDIM, ITEMSIZE = 128, 2


@dataclass(frozen=True)
class Call:
    """Blocks that ran, and how long they took."""

    heading: str
    transport: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


def calls(content: dict[str, Any]) -> Iterator[Call]:
    """All calls of a file that were divided, and whose transports the preset has."""
    ranks = content["world_size"]
    machine = find_machine("h200", ranks)
    for row in content["rows"]:
        hidden, *heads = MODELS[row["model"]]
        nheads, nheads_k = (max(count // (content["heads_of"] or ranks), 1) for count in heads)
        sizes = (row["batch_size"], row["seqlen_q"], row["seqlen_k"])
        workload = Workload(*sizes, nheads, nheads_k, HEADDIM, HEADDIM, hidden, ITEMSIZE, ranks, causal=True)
        seconds = row["seconds"]["graph"]
        product = seconds["product"]
        compute = ComputeCost(seconds["compute"] - product, product, machine.block_seconds)
        for transport in machine.transports:
            ran = row["plans"].get(transport.name, {}).get("graph", {"rows": []})
            if len(ran["rows"]) > 1 and (isinstance(transport, RingCost) or not ran["attended"]):
                blocks = Blocks(tuple(ran["rows"]), tuple(ran["attended"]))
                predicted = offer_of(workload, compute, transport).timeline(blocks).seconds
                heading = f"{row['model']}, {row['batch_size']} x {row['seqlen_q']}"
                yield Call(heading, transport.name, predicted, seconds[transport.name])


def main(files: Annotated[list[Path] | None, typer.Argument(help="Results of tiled_allreduce.py.")] = None) -> None:
    """Print predictions beside measurements, and the errors of each transport."""
    found: list[Call] = []
    for path in files or FILES:
        table = Table("call", "transport", "predicted, ms", "measured, ms", "error", title=path.name)
        for call in calls(json.loads(path.read_text())):
            times = (f"{1e3 * seconds:.3g}" for seconds in (call.predicted, call.measured))
            table.add_row(call.heading, call.transport, *times, f"{call.error:+.1%}")
            found.append(call)
        OUTPUT.print(table)
    for name in sorted({call.transport for call in found}):
        errors = [call.error for call in found if call.transport == name]
        spread = math.sqrt(sum(error**2 for error in errors) / len(errors))
        OUTPUT.print(
            f"{name}: {len(errors)} calls, {min(errors):+.1%} to {max(errors):+.1%}, root mean square {spread:.1%}"
        )


if __name__ == "__main__":
    typer.run(main)
