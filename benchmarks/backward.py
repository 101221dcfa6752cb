"""How fast are the gradients of a whole prompt, compared with torch's?

    python benchmarks/backward.py

2048 tokens of hidden size 2048, in heads of 64 and of 128, in every dtype; and one head of 8192 tokens, which torch
computes on one thread.
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.session import run_question
from fastattention.cli.bench.suite import backward

RESULTS = Path(__file__).parent / "results"


def main(seqlen: int = 2048, long: int = 8192, seconds: float = 10.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each problem; write backward.json and backward.png into `output`."""
    run_question("backward", backward(seqlen, long), seconds, output)


if __name__ == "__main__":
    typer.run(main)
