"""How fast is a whole prompt at once, and how far from what the processor can do?

    python benchmarks/prefill.py

Hidden size 2048 as 32 heads of 64 and 16 heads of 128, full and causal, in every dtype.
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.session import run_question
from fastattention.cli.bench.suite import prefill

RESULTS = Path(__file__).parent / "results"


def main(seqlen: int = 4096, seconds: float = 10.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each problem; write prefill.json and prefill.png into `output`."""
    run_question("prefill", prefill(seqlen), seconds, output)


if __name__ == "__main__":
    typer.run(main)
