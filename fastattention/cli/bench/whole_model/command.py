"""Measures a model over batches and lengths, and shows and writes the results."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rich.markup import escape

from fastattention.cli.bench.record import save_record, write_record
from fastattention.cli.bench.whole_model.build import build, find_config
from fastattention.cli.bench.whole_model.measure import ATTENTIONS, Cell, Effort, measure
from fastattention.cli.bench.whole_model.report import ModelReport, Row, write_png
from fastattention.cli.console import OUTPUT, progress_bar, status
from fastattention.cli.machine import describe_machine

GPU_CELLS = tuple(
    Cell(batch_size, seqlen)
    for batch_size, seqlens in ((1, (512, 1024, 2048, 4096, 8192, 16384, 32768)), (8, (512, 1024, 2048, 4096)))
    for seqlen in seqlens
)
CPU_CELLS = (Cell(1, 128), Cell(1, 512), Cell(1, 2048), Cell(4, 512))
QUICK_CELLS = (Cell(1, 128), Cell(1, 512))
FULL, QUICK = Effort(rounds=3, num_steps=16), Effort(rounds=1, num_steps=4)


@torch.inference_mode()
def answer(name: str, num_layers: int | None, quick: bool, output: Path) -> None:
    """Measure the first GPU, or the CPU where there is none; write model_NAME.json, and a picture, into `output`.

    float16 on a GPU, bfloat16 on a CPU. Raises ArgumentError for a model that is not known or cannot be built.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    cells = QUICK_CELLS if quick else GPU_CELLS if device.type == "cuda" else CPU_CELLS
    effort = QUICK if quick else FULL
    config = find_config(name, num_layers, max(cell.seqlen for cell in cells) + 1024)
    with status(f"making {name}"):
        model = build(config, dtype, device)
    rows: list[Row] = []
    report = ModelReport(
        name, config.num_hidden_layers, str(dtype).removeprefix("torch."), effort, describe_machine(), rows
    )
    path = output / f"model_{_file_name(name)}.json"
    with progress_bar() as bar:
        task = bar.add_task(escape(name), total=len(cells))
        for index, cell in enumerate(cells):
            bar.update(task, description=f"{cell.batch_size} x {cell.seqlen}", completed=index)

            def on_progress(fraction: float, done: int = index) -> None:
                bar.update(task, completed=done + fraction)

            rows.append(Row(cell, measure(model, cell, effort, on_progress)))
            save_record(path, report.to_json())
    for table in report.tables():
        OUTPUT.print(table)
    OUTPUT.print(f"in brackets: {ATTENTIONS[-1]} over the other, above 1 where it is faster")
    write_record(path, report.to_json(), partial(write_png, report))


def _file_name(name: str) -> str:
    return Path(name).resolve().name if Path(name).is_dir() else name.replace("/", "-of-")
