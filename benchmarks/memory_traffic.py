"""Does the model of main-memory traffic agree with the counters of a GPU?

    ncu --metrics dram__bytes_read.sum,dram__bytes_write.sum -k fastattention_forward \
        python benchmarks/memory_traffic.py

Runs our forward kernel once for each of some calls, in float16 at headdim 128, and prints the bytes that
docs/internals/traffic.md predicts for each, in the order in which ncu reports them. The keys of a head stay in the L2
cache in the first three. They do not fit it in the others, with a causal mask and without. Results that are still in
the L2 cache when a kernel ends are not among the bytes that ncu counts as written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import typer
from harness import show
from pages.markdown import table

from fastattention import explain, fast_attn_func
from fastattention.cli.console import errors_as_messages
from fastattention.errors import ArgumentError


class Shape(NamedTuple):
    """One call, with as many queries as keys."""

    batch_size: int
    seqlen: int
    nheads: int
    nheads_k: int
    causal: bool


SHAPES = (
    Shape(4, 16384, 16, 16, False),
    Shape(8, 8192, 32, 8, False),
    Shape(8, 8192, 32, 8, True),
    Shape(1, 65536, 4, 4, True),
    Shape(1, 524288, 1, 1, False),
)
HEADDIM = 128


def main() -> None:
    """Run the calls on the current GPU and print what is predicted for each."""
    with errors_as_messages(), torch.inference_mode():
        if not torch.cuda.is_available():
            raise ArgumentError("this script needs a CUDA device, and torch sees none")
        headings = ["call", "read", "written", "in all", "lower bound", "standard attention"]
        show(table(headings, map(run, SHAPES)))


def run(shape: Shape) -> list[str]:
    """Call the kernel once; returns the cells of a row, in bytes."""
    q = torch.randn(shape.batch_size, shape.seqlen, shape.nheads, HEADDIM, device="cuda", dtype=torch.float16)
    k, v = torch.randn(2, shape.batch_size, shape.seqlen, shape.nheads_k, HEADDIM, device="cuda", dtype=torch.float16)
    fast_attn_func(q, k, v, causal=shape.causal, backend="cuda")
    torch.cuda.synchronize()
    traffic = explain(q, k, v, causal=shape.causal, backend="cuda").traffic
    if traffic is None or traffic.tiled is None:
        raise ArgumentError("the cuda backend does not serve this call here; `fastattention info` says why")
    heads = f"{shape.nheads} heads on {shape.nheads_k}{', causal' if shape.causal else ''}"
    sizes = (*traffic.tiled, traffic.tiled.total, traffic.lower_bound, traffic.standard.total)
    return [f"{shape.batch_size} x {shape.seqlen}, {heads}", *(f"{size:,}" for size in sizes)]


if __name__ == "__main__":
    typer.run(main)
