"""How fast are the kernels of older instruction sets?

    python benchmarks/isa.py                              # all that this processor runs, each in its own process
    FASTATTENTION_CPU_ISA=avx2 python benchmarks/isa.py   # that one

A float32 prefill and a decode against peers, which use any instruction set. The limits are those of the measured
instruction set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer
from harness import RESULTS

from fastattention import environment
from fastattention.backends.cpu.library import available_isas
from fastattention.cli.bench.session import run_question
from fastattention.cli.bench.suite import decode, prefill


def main(seqlen: int = 4096, seconds: float = 10.0, output: Path = RESULTS) -> None:
    """Spend about `seconds` on each problem; write isa_NAME and isa_NAME_decode, .json and .png, into `output`."""
    forced = environment.cpu_isa()
    if forced is not None:
        workloads = [workload for workload in prefill(seqlen) if workload.dtype == "float32"]
        run_question(f"isa_{forced}", workloads, seconds, output)
        run_question(f"isa_{forced}_decode", decode(), seconds, output)
        return
    for isa in available_isas():
        # A process loads its kernels once, so each instruction set has a process.
        subprocess.run([sys.executable, *sys.argv], env={**os.environ, "FASTATTENTION_CPU_ISA": isa}, check=True)


if __name__ == "__main__":
    typer.run(main)
