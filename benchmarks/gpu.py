"""How fast is prefill on a GPU, on each code path it can run, compared with torch's three kernels?

python benchmarks/gpu.py
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.gpu import FULL_SEQLENS, answer

RESULTS = Path(__file__).parent / "results"


def main(rounds: int = 9, output: Path = RESULTS) -> None:
    """Measure the current GPU; write gpu.json into `output`."""
    answer(FULL_SEQLENS, rounds, output)


if __name__ == "__main__":
    typer.run(main)
