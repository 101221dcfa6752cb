"""What does a call cost when there is nothing to compute?

    python benchmarks/overhead.py

fast_attn_func and fast_attn_with_kvcache on one token of one head of 64, in microseconds.
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.session import run_question
from fastattention.cli.bench.suite import overhead

RESULTS = Path(__file__).parent / "results"


def main(seconds: float = 2.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each problem; write overhead.json and overhead.png into `output`."""
    run_question("overhead", overhead(), seconds, output)


if __name__ == "__main__":
    typer.run(main)
