"""Does the model of `fastattention plan allreduce` predict the measurements?

    python benchmarks/tiled_allreduce_model.py

It reads results of tiled_allreduce.py, and predicts the times of their blocks in CUDA graphs: from the compute that was
measured with them, and from the transports of the h200 preset with as many ranks. No device is needed. Left out are
transports that the preset lacks or that sum whole calls only, and runs with reserved SMs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from harness import RESULTS, show
from pages.markdown import table

from fastattention.cli.console import OUTPUT
from fastattention.cli.plan.allreduce_model import Prompt, predict
from fastattention.cli.plan.machines import Machine, find_machine
from fastattention.distributed.row_partitions import Partition

FILES = [RESULTS / f"tiled_allreduce_{name}.json" for name in ("tp2", "tp2_heads_of_4", "tp4")]
MODELS = {"7B": (4096, 32), "70B": (8192, 64)}  # hidden, nheads
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
        """Error of the prediction, as a share of the measurement."""
        return self.predicted / self.measured - 1


def calls(content: dict[str, Any]) -> Iterator[Call]:
    """All calls of a file that were divided, by transports that the model supports."""
    ranks = content["world_size"]
    for row in content["rows"]:
        hidden, nheads = MODELS[row["model"]]
        sizes = (row["batch_size"], row["seqlen_q"], nheads // (content.get("heads_of") or ranks))
        prompt = Prompt(*sizes, HEADDIM, HEADDIM, hidden, ITEMSIZE, ranks)
        seconds = row["seconds"]["graph"]
        machine = as_measured(prompt, seconds["compute"], seconds["product"])
        for transport in machine.transports:
            ran = row["plans"].get(transport.name, {}).get("graph", {"rows": []})
            if len(ran["rows"]) > 1 and transport.recipes and not ran.get("room", {}).get("left_free"):
                partition = Partition(tuple(ran["rows"]), tuple(ran.get("attended", ())))
                predicted = predict(prompt, machine, transport, partition).seconds
                heading = f"{row['model']}, {row['batch_size']} x {row['seqlen_q']}"
                yield Call(heading, transport.name, predicted, seconds[transport.name])


def as_measured(prompt: Prompt, compute: float, product: float) -> Machine:
    """The preset, with rates at which one block takes these seconds of compute, of which `product` for the GEMM."""
    machine = find_machine("h200", prompt.tp)
    half = machine.block_seconds / 2
    return replace(
        machine,
        attention_rate=prompt.attention_flop(0, prompt.rows) / (compute - product - half),
        projection_rate=prompt.projection_flop(prompt.rows) / (product - half),
    )


def main(files: Annotated[list[Path] | None, typer.Argument(help="Results of tiled_allreduce.py.")] = None) -> None:
    """Print predictions with measurements, and the errors of each transport."""
    found: list[Call] = []
    for path in files or FILES:
        rows = []
        for call in calls(json.loads(path.read_text())):
            times = (f"{1e3 * seconds:.3g}" for seconds in (call.predicted, call.measured))
            rows.append([call.heading, call.transport, *times, f"{call.error:+.1%}"])
            found.append(call)
        headings = ["call", "transport", "predicted, ms", "measured, ms", "error"]
        show(f"## {path.name}", table(headings, rows, text_columns=2))
    for name in sorted({call.transport for call in found}):
        errors = [call.error for call in found if call.transport == name]
        spread = math.sqrt(sum(error**2 for error in errors) / len(errors))
        OUTPUT.print(
            f"{name}: {len(errors)} calls, {min(errors):+.1%} to {max(errors):+.1%}, root mean square {spread:.1%}"
        )


if __name__ == "__main__":
    typer.run(main)
