"""`fastattention compile`: writes the machine code of one GPU kernel to a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box
from rich.markup import escape
from rich.table import Table

from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V
from fastattention.backends.cuda.attention.config import KernelConfig
from fastattention.backends.cuda.attention.variants import Feature, choose_decode_variant, choose_variant
from fastattention.cli.console import OUTPUT, check_output_file, status
from fastattention.errors import ArgumentError
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import ARCHS, Limits, limits_of, targets_of
from fastattention.gpu_runtime.variant import Entry


def compile_variant(
    *,
    arch: int,
    target: int,
    headdim: int,
    headdim_v: int,
    dtype: str,
    features: Sequence[str],
    decode: bool,
    cache: str | None,
    output: Path,
) -> None:
    """Write the cubin of the variant that such a call gets to `output`; print its resource usage. Needs no GPU.

    features: values of Feature, without the format of a cache; decode: one query over a cache; cache: the format of a
        quantized one, "int8" or "float8", which only a decode reads.
    Raises ArgumentError for a variant that does not exist, CompileError where it cannot be compiled or written.
    """
    limits = _checked_limits(arch, target)
    check_headdims(headdim=headdim, headdim_v=headdim_v)
    call = arch, limits, getattr(torch, dtype), headdim, headdim_v
    asked = [Feature(name) for name in features]
    if decode:
        kernel = choose_decode_variant(*call, [*asked, *([Feature(cache)] if cache else [])])
    else:
        _check_forward(arch, dtype, cache)
        kernel = choose_variant(*call, asked)
    check_output_file(output)
    compiler.version()  # loads the compiler, which does not count as the kernel's time
    start = time.perf_counter()
    with status("compiling"):
        cubin = compiler.compile_kernel(kernel, target)
    seconds = time.perf_counter() - start
    try:
        output.write_bytes(cubin.code)
    except OSError as error:
        raise ArgumentError(f"output={str(output)!r} cannot be written: {error.strerror}") from error
    OUTPUT.print(kernel.name, style="bold", soft_wrap=True)
    OUTPUT.print(_table(kernel, target, cubin, seconds, output))


def _check_forward(arch: int, dtype: str, cache: str | None) -> None:
    if cache is not None:
        raise ArgumentError(f"cache={cache} is read by decode kernels only; add --decode")
    if dtype == "bfloat16" and arch < 80:
        raise ArgumentError(
            f"dtype={dtype} has no kernel of its own at arch={arch}: calls are computed in float16; use dtype=float16"
        )


def check_headdims(**headdims: int) -> None:
    """Raises ArgumentError, naming the argument, for a head dimension that no kernel serves."""
    for name, value in headdims.items():
        most = MAX_HEADDIM_V if name == "headdim_v" else MAX_HEADDIM
        if not 1 <= value <= most:
            raise ArgumentError(f"{name}={value} is not served by the cuda backend; use 1 to {most}")


def _checked_limits(arch: int, target: int) -> Limits:
    if arch not in ARCHS:
        raise ArgumentError(f"arch={arch} has no code path; choose from {', '.join(map(str, sorted(ARCHS)))}")
    limits = limits_of(target)
    if limits is None or target < arch:
        raise ArgumentError(
            f"target={target} cannot be chosen with arch={arch}; choose from {', '.join(map(str, targets_of(arch)))}"
        )
    return limits


def _usage(entry: Entry, resources: compiler.Resources) -> str:
    return (
        f"{32 * entry.num_warps} threads, {resources.registers} registers each, {resources.spill_bytes} bytes spilled; "
        f"{entry.shared_bytes} bytes of shared memory"
    )


def _table(kernel: KernelConfig, target: int, cubin: compiler.Cubin, seconds: float, output: Path) -> Table:
    table = Table("", "", box=box.SIMPLE, show_header=False)
    rows = {
        "compute capability": f"{target / 10:.1f}",
        **{entry.name: _usage(entry, cubin.resources[entry.name]) for entry in kernel.entries},
        "compiler": f"NVRTC {'.'.join(map(str, compiler.version()))}, {seconds:.2f} s",
        "written": f"{output}, {len(cubin.code)} bytes",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table
