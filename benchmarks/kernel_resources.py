"""Which resources of a multiprocessor do the GPU kernels take, and do they fit their registers?

    python benchmarks/kernel_resources.py

Compiles every kernel whose keys and values are equally wide for the oldest GPU of its code path. Needs no GPU; needs
NVRTC 12, the last that builds for Pascal and Volta, and minutes. Spilled registers are a fault up to headdim 128.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import typer
from harness import RESULTS
from pages.markdown import table

from fastattention.backends.cuda.attention.variants import training_variants_of, variants_of
from fastattention.cli.console import OUTPUT, errors_as_messages, progress_bar
from fastattention.cli.machine import command_line, source_commit
from fastattention.cli.warmup import all_reduces_of
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import CHIPS, Limits
from fastattention.gpu_runtime.compiler import Resources
from fastattention.gpu_runtime.variant import Variant

# One GPU for every code path, and for Ampere also the smaller kind. The same kernels serve all others.
CHIP_NAMES = ("P100", "V100", "T4", "A100", "RTX 3090")
HEADINGS = (
    "kernel", "compute capability", "threads", "registers", "spilled bytes", "shared memory", "code bytes",
)  # fmt: skip


class Usage(NamedTuple):
    """The resources of one kernel."""

    kernel: Variant
    target: int  # compute capability
    resources: dict[str, Resources]  # by entry
    code_bytes: int

    @property
    def spill_bytes(self) -> int:
        """Spilled bytes of all its entries."""
        return sum(resources.spill_bytes for resources in self.resources.values())


def main(output: Path = RESULTS) -> None:
    """Write kernels_resources.md into `output`."""
    with errors_as_messages():
        chips = [CHIPS[name] for name in CHIP_NAMES]
        calls = list(dict.fromkeys((kernel, chip.arch) for chip in chips for kernel in kernels_of(chip)))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, progress_bar() as bar:
            measured = pool.map(lambda call: measure(*call), calls)
            usages = list(bar.track(measured, total=len(calls), description="compiling"))
        source = f"Commit: `{source_commit()}`. Command: `{command_line()}`."
        heading = f"NVRTC {'.'.join(map(str, compiler.version()))}, each for its own code path. {source}"
    output.mkdir(parents=True, exist_ok=True)
    path = output / "kernels_resources.md"
    path.write_text(f"# Resources of the GPU kernels\n\n{heading}\n\n{table(HEADINGS, map(cells, usages))}\n")
    spilling = sum(usage.spill_bytes > 0 for usage in usages)
    OUTPUT.print(f"{len(usages)} kernels, {spilling} of them spill registers: {path}", soft_wrap=True)


def kernels_of(chip: Limits) -> list[Variant]:
    """All kernels of prefill and caches for a GPU."""
    return [*variants_of(chip), *training_variants_of(chip), *all_reduces_of(chip)]


def measure(kernel: Variant, target: int) -> Usage:
    """Compile a kernel for a compute capability. Raises CompileError."""
    cubin = compiler.compile_kernel(kernel, target)
    return Usage(kernel, target, cubin.resources, len(cubin.code))


def cells(usage: Usage) -> list[str]:
    """The row of a kernel: figures of its first entry, but spills and code of all entries."""
    entry = usage.kernel.entries[0]
    registers = usage.resources[entry.name].registers
    figures = (32 * entry.num_warps, registers, usage.spill_bytes, entry.shared_bytes, usage.code_bytes)
    return [usage.kernel.name, f"{usage.target / 10:.1f}", *map(str, figures)]


if __name__ == "__main__":
    typer.run(main)
