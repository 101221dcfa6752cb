"""The kernels that are compared, ready for the model: ours as compiled now, and PyTorch's."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from fastattention.attention.validation import Options, prepare_dense
from fastattention.backends.cuda.attention.config import BackwardConfig, KernelConfig
from fastattention.backends.cuda.attention.variants import choose_variant
from fastattention.backends.cuda.attention.waves import choose_waves
from fastattention.cli.console import fail
from fastattention.gpu_runtime import compiler
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.compiler import Cubin, compile_kernel

from . import peer, tools
from .flow import epilogue, main_loop, prologue
from .launch import Launch, Problem, TileKind
from .paths import Paths, find_paths
from .predict import Model
from .sass import Function, Instruction

_ARCH = 70
Config = TypeVar("Config", KernelConfig, BackwardConfig)


def versions() -> dict[str, str]:
    """Versions of the compilers and tools that the figures depend on."""
    return {
        "NVRTC": ".".join(map(str, compiler.version())),
        "cuobjdump": tools.version(tools.cuobjdump()),
        "PyTorch": peer.TORCH.partition("==")[2],
    }


def cell(value: float | str) -> str:
    """A value as text for tables of counts."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


@functools.cache
def ours(headdim: int) -> Model:
    """The kernel that a V100 gets for a head dimension. Raises CompileError."""
    return of_config(configuration(headdim))


def configuration(headdim: int) -> KernelConfig:
    """The configuration that a V100 runs for a plain float16 call."""
    return choose_variant(_ARCH, CHIPS["V100"], torch.float16, headdim, headdim)


def varied(config: Config, changes: list[str]) -> Config:
    """A configuration with some fields changed: "tile_n=32", "queries_in_registers=1"."""
    kinds = {field.name: type(getattr(config, field.name)) for field in dataclasses.fields(config)}
    values = {}
    for change in changes:
        name, _, value = change.partition("=")
        if kinds.get(name) not in (int, bool) or not value.isdigit():
            numbers = ", ".join(name for name, kind in kinds.items() if kind in (int, bool))
            raise fail(f"--set {change}: give NAME=NUMBER, where NAME is one of {numbers}")
        values[name] = kinds[name](int(value))
    return dataclasses.replace(config, **values)


def compiled(config: KernelConfig | BackwardConfig) -> tuple[Function, Cubin]:
    """Any variant of our sm_70 kernels: its machine code, disassembled and as it is. Raises CompileError."""
    cubin = compile_kernel(config, _ARCH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin.code)
        (function,) = tools.disassemble(path)
    return function, cubin


def of_config(config: KernelConfig) -> Model:
    """Any variant of our sm_70 kernels, ready to predict. Raises CompileError."""
    function, cubin = compiled(config)
    launch = Launch(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        num_warps=config.num_warps,
        registers=cubin.resources[config.entries[0].name].registers,
        shared_bytes=config.shared_bytes,
        mask_rows=config.tile_m // config.num_warps,
        value_parts=config.num_value_parts,
        waves=functools.partial(_waves, config),
    )
    # The threads of a CTA store equal parts of its tile of float16 results.
    stored_bytes = 2 * config.tile_m * config.headdim_v // (32 * config.num_warps)
    return Model(find_paths(function, stored_bytes), launch)


def _waves(config: KernelConfig, problem: Problem) -> tuple[int, int]:
    """The heads that our launch starts together, and those before the last."""
    tokens = problem.batch_size, problem.seqlen, problem.nheads, problem.headdim
    q = torch.empty(tokens, dtype=torch.float16, device="meta")
    call, _ = prepare_dense(q, q, q, Options(causal=problem.causal, window_right=0 if problem.causal else -1))
    return choose_waves(call, config, problem.seqlen, problem.nheads, problem.seqlen, CHIPS["V100"])[1:]


@dataclass(frozen=True)
class Peer:
    """The CUTLASS kernel that PyTorch takes for a head dimension, and its ways around the loop over tiles of keys."""

    kernel: peer.PeerKernel
    function: Function
    full: list[Instruction]
    masked: list[Instruction]


def serving(headdim: int) -> Peer:
    """The kernel of a head dimension. Raises CompileError when it cannot be had."""
    kernel = peer.serving(headdim)
    function = peer.cutlass_kernels()[kernel.name]
    full, masked = (kernel.path(function, headdim, masked=masked) for masked in (False, True))
    return Peer(kernel, function, full, masked)


@functools.cache
def theirs(headdim: int) -> Model:
    """The kernel that PyTorch runs, ready to predict. Raises CompileError."""
    found = serving(headdim)
    kernel, function = found.kernel, found.function
    loop, trips = main_loop(function), kernel.trips(headdim)
    tiles = {
        TileKind.FULL: found.full,
        TileKind.TESTED: found.full,
        TileKind.MASKED: found.masked,
        TileKind.SKIPPED: found.full,
    }
    launch = Launch(
        tile_m=kernel.tile_m,
        tile_n=kernel.tile_n,
        num_warps=kernel.num_warps,
        registers=kernel.registers,
        shared_bytes=kernel.shared_bytes,
        mask_rows=kernel.tile_m,  # all warps see the same of a tile of keys
        masks_touching=True,
    )
    return Model(Paths(prologue(function, loop, trips), tiles, epilogue(function, loop, trips)), launch)
