"""What do the GPU kernels take of a multiprocessor, and do they fit their registers?

    python benchmarks/kernel_resources.py

Compiles every kernel whose keys and values are equally wide for the oldest GPU of its code path. Needs no GPU; needs
NVRTC 12, the last that builds for Pascal and Volta. Spilled registers are a fault up to headdim 128.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import typer

from fastattention.backends.cuda.chips import CHIPS
from fastattention.backends.cuda.jit import compiler
from fastattention.backends.cuda.jit.compiler import Resources
from fastattention.backends.cuda.jit.variants import variants_of
from fastattention.backends.cuda.kernel_config import KernelConfig
from fastattention.cli.console import OUTPUT, errors_as_messages, progress_bar

RESULTS = Path(__file__).parent / "results"
# One of every code path, and of Ampere also the smaller kind. All others are served by the same kernels.
CHIP_NAMES = ("P100", "V100", "T4", "A100", "RTX 3090")


class Usage(NamedTuple):
    """What one kernel takes."""

    kernel: KernelConfig
    resources: Resources
    code_bytes: int


def main(output: Path = RESULTS) -> None:
    """Write kernels_resources.md into `output`."""
    with errors_as_messages():
        kernels = list(dict.fromkeys(kernel for name in CHIP_NAMES for kernel in variants_of(CHIPS[name])))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, progress_bar() as bar:
            usages = list(bar.track(pool.map(measure, kernels), total=len(kernels), description="compiling"))
        heading = f"NVRTC {'.'.join(map(str, compiler.version()))}"
    output.mkdir(parents=True, exist_ok=True)
    path = output / "kernels_resources.md"
    path.write_text(f"# Resources of the GPU kernels\n\n{heading}, each for its own code path.\n\n{table(usages)}\n")
    spilling = sum(usage.resources.spill_bytes > 0 for usage in usages)
    OUTPUT.print(f"{len(usages)} kernels, {spilling} of them spill registers: {path}", soft_wrap=True)


def measure(kernel: KernelConfig) -> Usage:
    """Compile a kernel for the oldest GPU of its code path. Raises CompileError."""
    cubin = compiler.compile_kernel(kernel, kernel.arch)
    return Usage(kernel, cubin.resources, len(cubin.code))


def table(usages: list[Usage]) -> str:
    """One row a kernel, in Markdown."""
    lines = [
        "| kernel | threads | registers | spilled bytes | shared memory | code bytes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for kernel, resources, code_bytes in usages:
        cells = (
            kernel.name.removeprefix("forward_"),
            kernel.num_threads,
            resources.registers,
            resources.spill_bytes,
            kernel.shared_bytes,
            code_bytes,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    typer.run(main)
