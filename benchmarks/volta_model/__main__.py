"""How fast would our kernels be on a V100, compared with the one that PyTorch runs there? What limits them?

    python benchmarks/volta_model

Predicts both from their machine code (docs/internals/volta.md), and PyTorch's also where others have measured it.
Needs no GPU; needs NVRTC 12, and once pip for PyTorch's wheel and a disassembler.
Figures that are not called measured are predictions.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import typer

sys.path.insert(0, str(Path(__file__).parents[1]))

from fastattention.cli.bench.record import write_record
from fastattention.cli.console import OUTPUT, errors_as_messages, progress_bar
from fastattention.cli.machine import describe_machine
from fastattention.gpu_runtime import compiler
from volta_model import assumptions, kernels, peer, report
from volta_model.chip import V100
from volta_model.launch import Problem
from volta_model.predict import Model
from volta_model.published import FIGURES

RESULTS = Path(__file__).parents[1] / "results"
HEADDIMS = (64, 128, 256)
SEQLENS = (2048, 4096, 8192, 16384)
TOKENS, HIDDEN = 16384, 2048  # sizes of every problem, as in benchmarks/gpu.py


def main(output: Path = RESULTS) -> None:
    """Write volta_model.json and volta_model.md into `output`."""
    with errors_as_messages():
        judged = judge()
        compared = compare()
        changes = vary()
        version = ".".join(map(str, compiler.version()))
    machine = describe_machine()
    machine["versions"] |= {"NVRTC": version, "PyTorch": peer.TORCH.partition("==")[2]}
    document = {"machine": machine, "chip": dataclasses.asdict(V100), **report.as_json(judged, compared, changes)}
    write_record(output / "volta_model.json", document)
    text = page(judged, compared, changes, version)
    (output / "volta_model.md").write_text(text)
    OUTPUT.print(text, soft_wrap=True, markup=False, highlight=False)


def judge() -> list[report.Judged]:
    """The model's predictions for measurements of others."""
    models = {headdim: kernels.theirs(headdim) for headdim in {figure.problem.headdim for figure in FIGURES}}
    return [report.Judged(figure, models[figure.problem.headdim].predict(figure.problem)) for figure in FIGURES]


def compare() -> list[report.Compared]:
    """Both kernels on the problems of benchmarks/gpu.py."""
    compared = []
    with progress_bar() as bar:
        for headdim in bar.track(HEADDIMS, description="predicting"):
            ours, theirs = kernels.ours(headdim), kernels.theirs(headdim)
            compared += [_both(ours, theirs, problem) for problem in problems(headdim)]
    return compared


def vary() -> list[report.Assumption]:
    """The effect of other assumptions."""
    number = len(list(assumptions.changes()))
    with progress_bar() as bar:
        return list(bar.track(assumptions.vary(HEADDIMS[:2]), total=number, description="varying"))


def problems(headdim: int) -> list[Problem]:
    """Problems of 16K tokens and hidden size 2048, without a mask and causal."""
    nheads = HIDDEN // headdim
    return [Problem(s, TOKENS // s, nheads, headdim, causal) for causal in (False, True) for s in SEQLENS]


def _both(ours: Model, theirs: Model, problem: Problem) -> report.Compared:
    return report.Compared(ours.predict(problem), theirs.predict(problem))


def page(
    judged: list[report.Judged], compared: list[report.Compared], changes: list[report.Assumption], version: str
) -> str:
    """The results as Markdown."""
    return f"""# The model of a Volta SM

By `python benchmarks/volta_model`, for {V100.num_sms} SMs at {V100.clock_mhz} MHz. No V100 has run our kernels. Ours
compiled by NVRTC {version}, PyTorch's out of its wheel. Useful TFLOPS.

## PyTorch's CUTLASS kernel, where it has been measured

{report.judged_table(judged)}

{report.sources(judged)}

## Our kernel and PyTorch's, predicted

{report.errors_line(judged)}

{report.compared_table(compared)}

What the model leaves out:

{report.LEFT_OUT}

## What the figures that nobody knows for certain would change

Half of each, and twice as much; S 4096, nothing masked. Fewer tiles are simulated here than above, "none" included:
differences of 5% and less mean nothing.

{report.errors_line(judged)}

{report.assumptions_table(changes, HEADDIMS[:2])}
"""


if __name__ == "__main__":
    typer.run(main)
