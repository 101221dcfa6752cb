"""`fastattention plan ascend`: predicts tiles and time on an Ascend 910B or 910C. Needs no device."""

from __future__ import annotations

from pathlib import Path

import torch
from rich import box
from rich.table import Table

from fastattention.backends.ascend.call import MAX_HEADDIM
from fastattention.backends.ascend.chips import Chip, find_chip
from fastattention.backends.ascend.mask_tile import MASK_TILE
from fastattention.backends.ascend.simulator.core import WHAT_PIPES_DO
from fastattention.backends.ascend.simulator.gains import ablation, causes
from fastattention.backends.ascend.simulator.tiles import Tiling
from fastattention.backends.ascend.simulator.whole_chip import ChipPrediction, predict, simulated_operations
from fastattention.backends.ascend.simulator.workload import SimulatedCall
from fastattention.backends.ascend.tiling import buffer_uses, tiling_for
from fastattention.cli.bench.report import in_words
from fastattention.cli.console import OUTPUT, status
from fastattention.cli.plan.picture import check_output
from fastattention.errors import ArgumentError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
DRAWN_TILES = 6
NOTE = "Every time and rate is predicted: no Ascend device has run this (docs/internals/ascend-simulator.md)."


def plan(
    *,
    seqlen: int,
    seqlen_q: int | None,
    nheads: int,
    nheads_k: int | None,
    headdim: int,
    batch_size: int,
    causal: bool,
    dtype: str,
    chip_name: str,
    output: Path | None,
) -> None:
    """Print the plan of a call, and draw its timeline to `output` if given. Raises ArgumentError for a wrong option."""
    chip = find_chip(chip_name)
    workload = make_workload(batch_size, seqlen_q or seqlen, seqlen, nheads, nheads_k or nheads, headdim, causal, dtype)
    if output is not None:
        check_output(output)
    with status("simulating"):
        tiling = tiling_for(workload, chip)
        prediction = predict(workload, tiling, chip)
        tables = [_summary(prediction), _buffers(workload, tiling, chip), _ablation(workload, tiling, chip)]
        if tiling.outer_tile_n < workload.seqlen_k:
            tables.append(_causes(workload, tiling, chip))
    for table in (*tables, _where_time_goes(prediction)):
        OUTPUT.print(table)
    if output is not None:
        _draw(prediction, output)
    OUTPUT.print(NOTE)


def make_workload(
    batch_size: int, seqlen_q: int, seqlen_k: int, nheads: int, nheads_k: int, headdim: int, causal: bool, dtype: str
) -> SimulatedCall:
    """A call by the command's options. Raises ArgumentError, naming the option, for a wrong one."""
    if dtype not in DTYPES:
        raise ArgumentError(f"dtype={dtype!r} is not known; choose from {', '.join(DTYPES)}")
    if not 1 <= headdim <= MAX_HEADDIM:
        raise ArgumentError(f"headdim={headdim} is not served by the ascend backend; use 1 to {MAX_HEADDIM}")
    if nheads % nheads_k:
        raise ArgumentError(f"heads_k={nheads_k} does not divide heads={nheads}")
    right = 0 if causal else -1
    return SimulatedCall(
        batch_size, seqlen_q, seqlen_k, nheads, nheads_k, headdim, headdim, DTYPES[dtype], window_right=right
    )


def _summary(prediction: ChipPrediction) -> Table:
    workload, tiling, chip = prediction.workload, prediction.tiling, prediction.chip
    table = Table(title="Plan", title_justify="left", title_style="bold", box=box.SIMPLE, show_header=False)
    full_mask = workload.seqlen_q * workload.seqlen_k
    slices = tiling.outer_tile_m // chip.vectors_per_core // tiling.inner_tile_m
    name = chip.name if chip.dies == 1 else f"{chip.name} (910C, one die of {chip.dies})"
    rows = {
        "chip": f"{name}: {chip.num_cores} AI Cores at {chip.clock_ghz} GHz, peak {chip.peak_tflops:.0f} TFLOPS",
        "outer tile (Cube)": f"{tiling.outer_tile_m} queries x {tiling.outer_tile_n} keys",
        "inner tile (Vector)": f"{tiling.inner_tile_m} rows x {tiling.outer_tile_n} keys, {slices} for each Vector",
        "preload": f"{tiling.preload}: score tiles computed ahead {tiling.preload - 1}",
        "double buffering": "yes" if tiling.multibuffer else "no: too little room",
        "row blocks": f"{prediction.num_row_blocks}, splits of the keys {prediction.num_splits}",
        "predicted latency": in_words(prediction.seconds),
        "predicted rate": f"{prediction.tflops:.3g} TFLOPS, {prediction.fraction_of_peak:.0%} of the peak",
    }
    if workload.has_window:
        rows["mask"] = f"{MASK_TILE**2} bytes at any length; a full one would have {full_mask}"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _buffers(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> Table:
    table = Table(title="Buffers of a core", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("buffer")
    table.add_column("bytes", justify="right")
    table.add_column("of", justify="right")
    table.add_column("full", justify="right")
    table.add_column("holds")
    for use in buffer_uses(tiling, workload.shape, chip):
        parts = ", ".join(f"{part} {size}" for part, size in use.parts.items())
        table.add_row(use.buffer, str(use.used), str(use.allowed), f"{use.used / use.allowed:.0%}", parts)
    return table


def _ablation(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> Table:
    table = Table(title="Ablation, predicted", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy")
    for heading in ("time", "TFLOPS", "gain", "in all"):
        table.add_column(heading, justify="right")
    steps = ablation(workload, tiling, chip)
    for step in steps:
        seconds = step.prediction.seconds
        total = steps[0].prediction.seconds / seconds
        cells = (in_words(seconds), f"{step.prediction.tflops:.3g}", f"{step.gain:.2f}x", f"{total:.2f}x")
        table.add_row(step.name, *cells)
    if not workload.has_window:
        table.caption, table.caption_justify = (
            "Without a mask there is nothing for the tiling-mask: see --causal",
            "left",
        )
    return table


def _causes(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> Table:
    heading = "Why two-level tiling is faster, predicted"
    table = Table(title=heading, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("cause, one after another")
    table.add_column("factor", justify="right")
    for cause in causes(workload, tiling, chip):
        table.add_row(cause.name, f"{cause.factor:.2f}x")
    return table


def _where_time_goes(prediction: ChipPrediction) -> Table:
    table = Table(title="Where the time goes, predicted", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("pipe of a core")
    table.add_column("busy", justify="right")
    table.add_column("does")
    for pipe, share in prediction.busy.items():
        table.add_row(" ".join(pipe), f"{share:.1%}", WHAT_PIPES_DO[pipe])
    table.add_row("cores without work", f"{prediction.idle:.1%}", "launch, and row blocks that do not divide")
    return table


def _draw(prediction: ChipPrediction, path: Path) -> None:
    from fastattention.cli.plan.ascend_picture import write_picture  # needs an extra

    workload, tiling, chip = prediction.workload, prediction.tiling, prediction.chip
    most = int(workload.row_blocks(tiling.outer_tile_m, tiling.outer_tile_n)[:, 0].max())
    operations = simulated_operations(workload, tiling, chip, min(most, DRAWN_TILES))
    heading = f"First tiles of a row block of {workload.seqlen_q} queries and {workload.seqlen_k} keys"
    write_picture(operations, tiling, chip, heading, path, max(operation.end for operation in operations))
    OUTPUT.print(f"timeline: {path}", soft_wrap=True, markup=False)
