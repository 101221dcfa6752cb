"""`fastattention compile`: the machine code of one GPU kernel, in a file."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from fastattention.backends.cuda.chips import ARCHS, CHIPS, Limits
from fastattention.backends.cuda.jit import compiler
from fastattention.backends.cuda.jit.variants import choose_variant, known_limits
from fastattention.backends.cuda.kernel_config import MAX_HEADDIM, KernelConfig
from fastattention.cli.console import OUTPUT
from fastattention.errors import ArgumentError


def compile_variant(
    *, arch: int, target: int, headdim: int, headdim_v: int, dtype: str, scores: bool, paged: bool, output: Path
) -> None:
    """Write the cubin of the variant that such a call gets to `output`; print what it takes. Needs no GPU.

    Raises ArgumentError for a variant that does not exist, CompileError where it cannot be compiled or written.
    """
    limits = _checked_limits(arch, target)
    check_headdims(headdim=headdim, headdim_v=headdim_v)
    if dtype == "bfloat16" and arch < 80:
        raise ArgumentError(
            f"dtype={dtype} has no kernel of its own at arch={arch}: calls are computed in float16; use dtype=float16"
        )
    kernel = choose_variant(
        arch, limits, getattr(torch, dtype), headdim, headdim_v, modifies_scores=scores, paged=paged
    )
    compiler.version()  # loads the compiler, which is no part of the kernel's time
    start = time.perf_counter()
    cubin = compiler.compile_kernel(kernel, target)
    seconds = time.perf_counter() - start
    try:
        output.write_bytes(cubin.code)
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} cannot be written: {error.strerror}") from error
    OUTPUT.print(kernel.name, style="bold", soft_wrap=True)
    OUTPUT.print(_table(kernel, target, cubin, seconds, output))


def check_headdims(**headdims: int) -> None:
    """Raises ArgumentError, naming the argument, for a head dimension that no kernel serves."""
    for name, value in headdims.items():
        if not 1 <= value <= MAX_HEADDIM:
            raise ArgumentError(f"{name}={value} is not served by the cuda backend; use 1 to {MAX_HEADDIM}")


def _checked_limits(arch: int, target: int) -> Limits:
    if arch not in ARCHS:
        raise ArgumentError(f"arch={arch} has no code path; choose from {', '.join(map(str, sorted(ARCHS)))}")
    limits = known_limits(target)
    if limits is None or target < arch:
        targets = sorted({limits.target for limits in CHIPS.values() if limits.target >= arch})
        raise ArgumentError(
            f"target={target} cannot be chosen with arch={arch}; choose from {', '.join(map(str, targets))}"
        )
    return limits


def _table(kernel: KernelConfig, target: int, cubin: compiler.Cubin, seconds: float, output: Path) -> Table:
    resources = cubin.resources
    table = Table("", "", box=box.SIMPLE, show_header=False)
    rows = {
        "compute capability": f"{target / 10:.1f}",
        "registers": f"{resources.registers} a thread, {kernel.num_threads} threads",
        "spills": f"{resources.spill_bytes} bytes",
        "shared memory": f"{kernel.shared_bytes} bytes",
        "compiler": f"NVRTC {'.'.join(map(str, compiler.version()))}, {seconds:.2f} s",
        "written": f"{output}, {len(cubin.code)} bytes",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
