"""The kernels that are compared, ready for the model: ours as it is compiled here and now, and PyTorch's."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

import fastattention.problem
from fastattention.backends.cuda import heuristics
from fastattention.backends.cuda.chips import CHIPS
from fastattention.backends.cuda.heuristics import KernelConfig
from fastattention.backends.cuda.jit.compiler import compile_kernel
from fastattention.backends.cuda.jit.variants import choose_variant
from fastattention.problem import Layout

from . import peer, tools
from .flow import epilogue, main_loop, prologue
from .launch import Launch, Problem, TileKind
from .paths import Paths, find_paths
from .predict import Model

_ARCH = 70


@functools.cache
def ours(headdim: int) -> Model:
    """The kernel that a V100 gets for a head dimension. Raises CompileError."""
    return of_config(choose_variant(_ARCH, CHIPS["V100"], torch.float16, headdim, headdim))


def of_config(config: KernelConfig) -> Model:
    """Any variant of our sm_70 kernel. Raises CompileError."""
    cubin = compile_kernel(config, _ARCH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin.code)
        (function,) = tools.disassemble(path)
    launch = Launch(
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        num_warps=config.num_warps,
        registers=cubin.resources.registers,
        shared_bytes=config.shared_bytes,
        mask_rows=config.tile_m // config.num_warps,
        value_parts=config.num_value_parts,
        heads_together=_heads_together,
    )
    return Model(find_paths(function), launch)


def _heads_together(problem: Problem) -> int:
    """As many as our launch takes."""
    call = fastattention.problem.Problem(
        layout=Layout.DENSE,
        device=torch.device("cuda"),
        dtype=torch.float16,
        batch_size=problem.batch_size,
        seqlen_q=problem.seqlen,
        seqlen_k=problem.seqlen,
        total_q=problem.batch_size * problem.seqlen,
        nheads=problem.nheads,
        nheads_k=problem.nheads,
        headdim=problem.headdim,
        headdim_v=problem.headdim,
        softmax_scale=problem.headdim**-0.5,
        window_left=-1,
        window_right=0 if problem.causal else -1,
    )
    return heuristics.heads_together(call, CHIPS["V100"])


@functools.cache
def theirs(headdim: int) -> Model:
    """The CUTLASS kernel that PyTorch takes for a head dimension. Raises CompileError."""
    kernel = peer.serving(headdim)
    function = peer.cutlass_kernels()[kernel.name]
    loop, trips = main_loop(function), kernel.trips(headdim)
    full = kernel.path(function, headdim)
    tiles = {
        TileKind.FULL: full,
        TileKind.MASKED: kernel.path(function, headdim, masked=True),
        TileKind.SKIPPED: full,
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
