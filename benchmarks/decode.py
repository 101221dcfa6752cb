"""How fast is one query against a long cache, and how close to the speed of memory?

    python benchmarks/decode.py

Eight query heads a key head in half precision, against torch SDPA and the best that can be written by hand in torch; as
many key heads as query heads in every dtype; and 4096 keys in float16, where ggml reads at the speed of memory. Our
caches are tensors stored heads first or tokens first, and packed in a PackedKVStore.
"""

from __future__ import annotations

from pathlib import Path

import typer

from fastattention.cli.bench.session import run_question
from fastattention.cli.bench.suite import decode

RESULTS = Path(__file__).parent / "results"


def main(grouped_keys: int = 131072, keys: int = 16384, seconds: float = 10.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each problem; write decode.json and decode.png into `output`."""
    run_question("decode", decode(grouped_keys, keys), seconds, output)


if __name__ == "__main__":
    typer.run(main)
