"""How fast is the kernel for Ascend NPUs on a GPU, compiled by upstream Triton, compared with the cuda backend?

python benchmarks/ascend_on_cuda.py

It says nothing about an NPU. It measures the same kernel where it can run, in tiles that suit the GPU.
tests/ascend/test_on_device.py runs the list of cases on it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from harness import RESULTS

from fastattention.attention.problem import Problem
from fastattention.backends.ascend import call
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.simulator.workload import padded
from fastattention.backends.ascend.tiling import Tiling
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.cli.bench import gpu
from fastattention.cli.bench.record import write_record
from fastattention.cli.machine import describe_machine

CTAS_PER_MULTIPROCESSOR = 2


class UpstreamTritonBackend(AscendBackend):
    """The Triton kernels of the ascend backend on the first GPU, from compute capability 8.0 on."""

    name = "ascend-on-cuda"

    def why_unavailable(self) -> str | None:
        """Needs a GPU and upstream Triton."""
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if torch.cuda.get_device_capability() < (8, 0):
            return "upstream Triton needs compute capability 8.0"
        return None if importlib.util.find_spec("triton") else "triton is not installed"

    def describe(self) -> str:
        """The GPU."""
        return torch.cuda.get_device_name()

    def _why_not_device(self, problem: Problem) -> str | None:
        return None if problem.device.type == "cuda" else f"tensors are on {problem.device}, not on cuda"

    def _implementations(self) -> tuple[str, ...]:
        return ("triton",)

    def _why_no_compiler(self) -> str | None:
        return None

    def _chip(self, problem: Problem) -> Chip:
        return _multiprocessors_as_cores(problem.device)

    def _tiling(self, problem: Problem, chip: Chip) -> Tiling:
        return tiling(problem)

    def _launch(self, launch: call.Launch) -> None:
        constants = launch.constants
        warps = 8 if constants["TILE_M"] * constants.get("TILE_N", 0) >= 128 * 128 else 4
        kernel = _specialized(launch.kernel)
        kernel[(launch.num_programs,)](**launch.arguments, **constants, num_warps=warps, num_stages=2)


@functools.cache
def _specialized(kernel: Any) -> Any:
    """The kernel as Triton compiles it by default: on a GPU it must know which rows begin at multiples of 16."""
    return importlib.import_module("triton").jit(kernel.fn)


@functools.cache
def _multiprocessors_as_cores(device: torch.device) -> Chip:
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return replace(CHIPS["910B2"], num_cores=CTAS_PER_MULTIPROCESSOR * count)


def tiling(problem: Problem) -> Tiling:
    """Tiles that fit a multiprocessor: registers for the scores and the output, shared memory for keys and values."""
    widest = padded(max(problem.headdim, problem.headdim_v))
    rows = problem.group_size if call.rows_are_heads(problem) else problem.seqlen_q
    tile_m = 128 if rows > 64 and widest <= 128 else 64 if rows > 16 else 16
    tile_n = {64: 64, 128: 128, 256: 32}.get(widest, 64) if tile_m >= 64 else 64
    if problem.dtype is torch.float32:
        tile_m, tile_n = min(tile_m, 32), 32  # no matrix instructions: operands of products are registers
    if problem.page_block_size is not None:
        tile_n = min(tile_n, padded(problem.page_block_size))
    return Tiling(outer_tile_m=tile_m, outer_tile_n=tile_n, inner_tile_m=tile_m, preload=1, multibuffer=True)


def main(rounds: int = 9, output: Path = RESULTS) -> None:
    """Measure the current GPU; write ascend_on_cuda.json into `output`."""
    arch = gpu.newest_path()
    backends = {f"fastattention sm{arch}": CudaBackend(arch), "Triton kernel": UpstreamTritonBackend()}
    machine = {**describe_machine(), "triton": importlib.import_module("triton").__version__}
    report = {"machine": machine, "measurements": gpu.measure(backends, gpu.FULL_SEQLENS, rounds)}
    write_record(output / "ascend_on_cuda.json", report)


if __name__ == "__main__":
    typer.run(main)
