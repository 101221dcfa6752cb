"""Draws long_context.json: milliseconds a token by policy, against the sequence and against the layers on the CPU.

python benchmarks/long_context_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import typer

RESULTS = Path(__file__).parent / "results"
MODEL = "llama-3-8b"
TICKS = (15, 30, 60, 120, 240)  # ms
COLOURS = {"classical": "tab:red", "cooperative": "tab:blue", "hybrid": "tab:green"}


def draw(panel: Any, rows: list[dict[str, Any]], across: str) -> None:
    """Draws measured points and predicted lines."""
    at = [row[across] for row in rows]
    for policy, colour in COLOURS.items():
        panel.plot(at, [1e3 * row["predicted"][policy] for row in rows], color=colour, linewidth=1)
        panel.plot(at, [1e3 * row["seconds"][policy] for row in rows], "o", color=colour, label=policy)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(at, [str(value) for value in at])
    panel.minorticks_off()
    panel.set_xlabel("keys" if across == "seqlen" else "layers on the CPU, of 32")
    panel.grid(alpha=0.3)


def main(results: Path = RESULTS) -> None:
    """Reads long_context.json in `results` and writes long_context.png there."""
    record = json.loads((results / "long_context.json").read_text())
    rows = [row for row in record["rows"] if row["model"] == MODEL and row["num_layers_cpu"] and not row["quantized"]]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    draw(
        panels[0], sorted((row for row in rows if row["num_layers_cpu"] == 8), key=lambda row: row["seqlen"]), "seqlen"
    )
    draw(panels[1], [row for row in rows if row["seqlen"] == 131072], "num_layers_cpu")
    panels[0].set_title("8 layers on the CPU")
    panels[1].set_title("131072 keys")
    panels[0].set_ylabel("ms a token")
    panels[0].set_yticks(TICKS, [str(tick) for tick in TICKS])
    panels[0].legend()
    gpu = ", ".join(record["machine"]["gpus"])
    figure.suptitle(f"{MODEL}, bfloat16, batch 1, {gpu}: points are measured, lines predicted", fontsize=10)
    figure.savefig(results / "long_context.png", dpi=110)


if __name__ == "__main__":
    typer.run(main)
