"""How long do variable-length sequences take without padding?

    python benchmarks/varlen.py

Eight causal sequences, 3584 tokens in all, against a loop over torch SDPA and against padding to 16384 tokens.
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.session import run_question
from fastattention.cli.bench.suite import varlen

RESULTS = Path(__file__).parent / "results"


def main(longest: int = 2048, seconds: float = 5.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each problem; write packed.json and packed.png into `output`."""
    run_question("packed", varlen(longest), seconds, output)


if __name__ == "__main__":
    typer.run(main)
