"""How fast is linear attention, compared with operations of torch, Transformers and flash-linear-attention?

python benchmarks/linear.py
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.linear import answer

RESULTS = Path(__file__).parent / "results"


def main(rounds: int = 9, output: Path = RESULTS) -> None:
    """Measure the current GPU, or this CPU; write linear_gpu.json or linear_cpu.json into `output`."""
    answer(rounds, output)


if __name__ == "__main__":
    typer.run(main)
