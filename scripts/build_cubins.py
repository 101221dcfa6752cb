"""Compile kernels ahead, so that a GPU's first calls wait for no compiler and need none.

    python scripts/build_cubins.py

Writes cubins to fastattention/gpu_runtime/cubins, from which wheels are built, and removes stale ones there. For every
GPU of chips.py it builds all kernels of prefill with equally wide keys and values, and the common ones of caches.
Machine code runs on every later GPU of its generation, so code for compute capability 8.0 serves 8.6, 8.7 and 8.9.
Needs NVRTC 12, the last that builds for Pascal and Volta, and long on few cores. docs/guides/nvidia.md has the size
of the set.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import typer
from rich.table import Table

from fastattention.backends.cuda.attention.config import WIDEST_OF_A_WARP, AppendConfig, KernelConfig
from fastattention.backends.cuda.attention.variants import UNQUANTIZED, training_variants_of, variants_of
from fastattention.cli.console import OUTPUT, errors_as_messages, progress_bar
from fastattention.cli.warmup import all_reduces_of
from fastattention.gpu_runtime import cache, compiler
from fastattention.gpu_runtime.chips import CHIPS, Limits
from fastattention.gpu_runtime.variant import Variant


class Built(NamedTuple):
    """One cubin to build ahead."""

    kernel: Variant
    target: int


def main() -> None:
    """Build the set into the source tree and print its size."""
    with errors_as_messages():
        wanted = cubins_to_build()
        cache.BUILT_AHEAD.mkdir(exist_ok=True)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool, progress_bar() as bar:
            sizes = list(bar.track(pool.map(build, wanted), total=len(wanted), description="compiling"))
        current = {cache.built_ahead_path(*one) for one in wanted}
        for stale in set(cache.BUILT_AHEAD.glob("*.cubin")) - current:
            stale.unlink()
    show(wanted, sizes)


def cubins_to_build() -> list[Built]:
    """The cubins that the GPUs of chips.py need, each once: GPUs of one generation share them."""
    return list(
        dict.fromkeys(
            Built(kernel, target_of(limits))
            for limits in CHIPS.values()
            for kernel in (
                *variants_of(limits, features=UNQUANTIZED),
                *training_variants_of(limits),
                *all_reduces_of(limits),
            )
            if is_common(kernel)
        )
    )


def is_common(kernel: Variant) -> bool:
    """Whether a kernel is built ahead. Decodes are many, 100 KB each: only common ones are, and no wide heads."""
    if isinstance(kernel, AppendConfig):
        return kernel.columns <= WIDEST_OF_A_WARP
    if not isinstance(kernel, KernelConfig):
        return True
    if not kernel.decodes:
        return kernel.headdim <= WIDEST_OF_A_WARP
    return kernel.headdim in (64, 128) and not kernel.modifies_scores


def target_of(limits: Limits) -> int:
    """The oldest compute capability whose machine code serves a GPU and has the instructions of its code path."""
    return max(cache.generation(limits.target), limits.arch)


def build(one: Built) -> int:
    """Compile a cubin into the source tree unless it is there; returns its bytes."""
    path = cache.built_ahead_path(*one)
    if not path.exists():
        cache.write_atomically(path, compiler.compile_kernel(*one).code)
    return path.stat().st_size


def show(wanted: list[Built], sizes: list[int]) -> None:
    """Print one row a compute capability."""
    table = Table("compute capability", "kernels", "MB")
    for target in sorted({one.target for one in wanted}):
        chosen = [size for one, size in zip(wanted, sizes, strict=True) if one.target == target]
        table.add_row(f"{target / 10:.1f}", str(len(chosen)), f"{sum(chosen) / 1e6:.2f}")
    table.add_row("all", str(len(sizes)), f"{sum(sizes) / 1e6:.2f}", style="bold")
    OUTPUT.print(table)


if __name__ == "__main__":
    typer.run(main)
