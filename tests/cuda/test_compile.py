"""NVRTC compiles every kernel for its own code path, without a GPU, and the kernels fit their registers."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastattention.backends.cuda.chips import CHIPS
from fastattention.backends.cuda.jit import compiler
from fastattention.backends.cuda.jit.variants import known_limits, variants_of
from fastattention.backends.cuda.kernel_config import MAX_REGISTERS
from fastattention.errors import CompileError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kernel_resources.py"
specification = importlib.util.spec_from_file_location("kernel_resources", SCRIPT)
assert specification is not None
assert specification.loader is not None
kernel_resources = importlib.util.module_from_spec(specification)
sys.modules[specification.name] = kernel_resources
specification.loader.exec_module(kernel_resources)

REASON = compiler.why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@functools.cache
def usages_of(chip: str) -> list[Any]:
    """kernel_resources.measure for every kernel of a GPU; the compiler releases Python's lock."""
    if (reason := compiler.why_not_target(CHIPS[chip].arch)) is not None:
        pytest.skip(reason)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(kernel_resources.measure, variants_of(CHIPS[chip])))


@pytest.mark.parametrize("chip", kernel_resources.CHIP_NAMES)
def test_every_kernel_compiles(chip: str) -> None:
    usages = usages_of(chip)
    assert len(usages) >= 18  # six head dimensions, three features
    for usage in usages:
        assert 0 < usage.resources.registers <= MAX_REGISTERS
        assert usage.code_bytes > 10_000


@pytest.mark.parametrize(
    ("chip", "headdim"), [("V100", 256), ("T4", 192), ("A100", 256), ("RTX 3090", 256)], ids=lambda value: str(value)
)
def test_no_register_is_spilled_up_to_a_head_dimension(chip: str, headdim: int) -> None:
    small = (usage for usage in usages_of(chip) if usage.kernel.headdim <= headdim)
    spilled = {usage.kernel.name: usage.resources.spill_bytes for usage in small if usage.resources.spill_bytes}
    assert spilled == {}


def test_every_code_path_is_reported() -> None:
    assert {CHIPS[chip].arch for chip in kernel_resources.CHIP_NAMES} == {limits.arch for limits in CHIPS.values()}
    usage = kernel_resources.Usage(variants_of(CHIPS["T4"])[0], compiler.Resources(200, 16, 8), 40_000)
    assert kernel_resources.table([usage]).splitlines()[-1].startswith("| sm75_float16_d32x32_")
    assert kernel_resources.table([usage]).endswith(f"| 200 | 16 | {usage.kernel.shared_bytes} | 40000 |")


def test_machine_code_is_of_the_kernel() -> None:
    limits = known_limits(75)
    assert limits is not None
    cubin = compiler.compile_kernel(variants_of(limits, headdims=(32,))[0], 75)
    assert cubin.code.startswith(b"\x7fELF")
    assert compiler.ENTRY.encode() in cubin.code


def test_a_kernel_that_does_not_compile_gives_the_log() -> None:
    kernel = dataclasses.replace(variants_of(CHIPS["T4"], headdims=(32,))[0], tile_m=100)
    with pytest.raises(CompileError, match=rf"(?s){kernel.name} does not compile for sm_75:.*share the rows evenly"):
        compiler.compile_kernel(kernel, 75)


@pytest.mark.parametrize(
    ("target", "advice"),
    [(35, "CUDA 12 is the last that builds for Pascal and Volta"), (999, "a newer NVRTC may")],
    ids=["older", "newer"],
)
def test_a_gpu_that_the_compiler_does_not_know_is_refused_with_versions(target: int, advice: str) -> None:
    major, minor = compiler.version()
    with pytest.raises(CompileError, match=f"NVRTC {major}.{minor} builds for .*, not {target}; {advice}"):
        compiler.compile_kernel(variants_of(CHIPS["T4"], headdims=(32,))[0], target)
