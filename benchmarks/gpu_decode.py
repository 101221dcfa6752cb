"""How fast is decode on a GPU, how close to the speed of its memory, compared with torch's kernels?

python benchmarks/gpu_decode.py
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.gpu import FULL_SEQLENS
from fastattention.cli.bench.gpu_decode import answer

RESULTS = Path(__file__).parent / "results"


def main(rounds: int = 9, output: Path = RESULTS) -> None:
    """Measure the current GPU; write gpu_decode.json into `output`."""
    answer(FULL_SEQLENS, rounds, output)


if __name__ == "__main__":
    typer.run(main)
