"""Backward kernels for sm_70, ours and PyTorch's: the instructions of a warp for one streamed tile.

Kernels compute different products of different tiles, so everything is relative to the useful work: five products of a
query, a key and a head dimension (q k^T, do v^T, p^T do, ds k, ds^T q), without repeated ones.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch

from fastattention.backends.cuda.attention.config import BackwardConfig
from fastattention.backends.cuda.attention.variants import training_variants_of
from fastattention.gpu_runtime.chips import CHIPS

from . import kernels, peer_backward
from .chip import V100, Chip
from .counts import CYCLES_PER_HMMA, UNIT, Counts
from .flow import steady_path, tile_loop
from .launch import Launch
from .multiprocessor import Multiprocessor, Outcome
from .operation import operations
from .sass import Function, Instruction

USEFUL_PRODUCTS = 5
_ARCH = 70
_PRODUCTS_OF_HMMA = 256  # multiply-adds of a warp: a fourth of four 8x8x4 products
_TILES = 2, 6  # numbers of tiles that are simulated; the difference is the pace
_EXIT = Instruction(0, "EXIT", None, "EXIT", 1, False, None, None, 0, 0)

# Instructions by purpose, as far as their names tell.
KINDS = {
    "matrix products": "HMMA",
    "shared memory": "LDS STS",
    "global memory": "LDG STG LD ST ATOM ATOMG RED MEMBAR ERRBAR CCTL",
    "local memory": "LDL STL",
    "weights and their gradients": "MUFU FFMA FADD FMUL FSEL HADD2 HFMA2 HMUL2",
    "rounding, exchange, selection": "F2F PRMT SHFL SEL",
    "barriers": "BAR WARPSYNC",
}
OTHERS = "addresses, branches, rest"
_KIND_OF = {name: kind for kind, names in KINDS.items() for name in names.split()}
_ATOMICS = {"ATOM", "ATOMG", "RED"}


@dataclass(frozen=True)
class BackwardKernel:
    """One kernel, and the path of its first warp once around the loop over tiles."""

    title: str
    name: str
    headdim: int
    tile_m: int  # rows of a CTA
    tile_n: int  # rows of a streamed tile
    num_warps: int
    value_parts: int  # CTAs that share the columns of a gradient, and all compute the weights
    registers: int
    shared_bytes: int
    stack_bytes: int
    path: tuple[Instruction, ...]
    delta_issue_cycles: int = 0  # of a warp for delta of a tile, outside the loop, where every CTA computes it

    @cached_property
    def counts(self) -> Counts:
        """Counts of the path."""
        return Counts.of(self.path)

    @property
    def pairs(self) -> float:
        """Pairs of a query and a key that a warp adds to its gradients in a tile."""
        return self.tile_m * self.tile_n / self.num_warps / self.value_parts

    @property
    def products(self) -> float:
        """Products that it computes, repeated ones included; 5 suffice for all gradients."""
        return self.counts.hmma * _PRODUCTS_OF_HMMA / (self.pairs * self.headdim)

    @property
    def useful_tensor_cycles(self) -> float:
        """Tensor cycles of a sub-core for the useful products of a warp's tile, for all gradients together."""
        return CYCLES_PER_HMMA * USEFUL_PRODUCTS * self.headdim * self.pairs / _PRODUCTS_OF_HMMA

    def per_product(self, count: float) -> float:
        """A count of the path, for UNIT tensor cycles of the kernel's own products."""
        return count * UNIT / (CYCLES_PER_HMMA * self.counts.hmma)

    def per_useful(self, count: float) -> float:
        """A count of the path, for UNIT tensor cycles of useful products. Counts of several kernels add up."""
        return count * UNIT / self.useful_tensor_cycles

    @property
    def residents(self) -> int:
        """CTAs that an SM holds. Raises ValueError when it holds none."""
        launch = Launch(self.tile_m, self.tile_n, self.num_warps, self.registers, self.shared_bytes, self.tile_m)
        return launch.residents(V100)

    @property
    def cycles_by_kind(self) -> Counter[str]:
        """Issue cycles of the path by purpose, KINDS and OTHERS."""
        cycles: Counter[str] = Counter()
        for instruction in self.path:
            cycles[_KIND_OF.get(instruction.name, OTHERS)] += instruction.stall
        return cycles

    @property
    def shared_wavefronts(self) -> int:
        """Wavefronts of 128 bytes for a warp's accesses to shared memory, without bank conflicts."""
        widths = [instruction.width for instruction in self.path if instruction.name in ("LDS", "STS")]
        return sum(-(-width * 32 // 128) for width in widths)

    @property
    def global_bytes(self) -> int:
        """Bytes that a thread loads from and stores to global memory in a tile."""
        names = ("LDG", "STG", "LD", "ST", *_ATOMICS)
        return sum(i.width for i in self.path if i.name in names and not i.is_off)

    @property
    def global_atomics(self) -> int:
        """Atomic instructions on global memory in the path."""
        return sum(instruction.name in _ATOMICS for instruction in self.path)


def configurations(headdim: int) -> list[BackwardConfig]:
    """Our kernels for a plain float16 call on a V100. Raises CompileError when none fits."""
    variants = training_variants_of(CHIPS["V100"], (headdim,), (torch.float16,), _ARCH)
    backwards = [variant for variant in variants if isinstance(variant, BackwardConfig)]
    return [config for config in backwards if not (config.modifies_scores or config.drops)]


def ours(config: BackwardConfig) -> BackwardKernel:
    """A kernel of ours, compiled. Raises CompileError."""
    function, cubin = kernels.compiled(config)
    return BackwardKernel(
        title=config.gradients,
        name=config.name,
        headdim=config.headdim,
        tile_m=config.tile_m,
        tile_n=config.tile_n,
        num_warps=config.num_warps,
        value_parts=config.num_value_parts,
        registers=cubin.resources[config.entries[0].name].registers,
        shared_bytes=config.shared_bytes,
        stack_bytes=function.stack_bytes or 0,
        path=unmasked_path(function),
    )


def unmasked_path(function: Function) -> tuple[Instruction, ...]:
    """The path once around the loop over tiles, for a kernel whose branches tell its paths, like ours."""
    return tuple(steady_path(tile_loop(function), {}))


def theirs(headdim: int) -> BackwardKernel:
    """The kernel that PyTorch runs. Raises CompileError when it cannot be had."""
    kernel = peer_backward.serving(headdim)
    function = peer_backward.function(kernel)
    return BackwardKernel(
        title="PyTorch",
        name=kernel.name,
        headdim=headdim,
        tile_m=kernel.tile_n,
        tile_n=kernel.tile_m,
        num_warps=kernel.num_warps,
        value_parts=1,
        registers=kernel.registers,
        shared_bytes=kernel.shared_bytes,
        stack_bytes=function.stack_bytes or 0,
        path=tuple(kernel.path(function, headdim)),
        delta_issue_cycles=sum(instruction.stall for instruction in kernel.delta_path(function)),
    )


@dataclass(frozen=True)
class Pace:
    """The model's figures for an SM full of one kernel's CTAs, in the steady state."""

    cycles: float  # of the SM for UNIT useful tensor cycles of each of its sub-cores
    tensor_share: float  # how busy tensor cores are, with all products
    shared_share: float  # how busy shared memory is
    issue_share: float
    lost_shares: dict[str, float]  # cycles in which tensor cores idle, by what the next warp waits for


def pace(kernel: BackwardKernel, chip: Chip = V100) -> Pace:
    """Predicts the loop. Raises ValueError for machine code that the model does not know."""
    few, many = (_simulate(kernel, tiles, chip) for tiles in _TILES)
    steady = many - few
    slots = steady.cycles * chip.num_schedulers
    warps = kernel.residents * kernel.num_warps / chip.num_schedulers
    useful = kernel.useful_tensor_cycles * warps * (_TILES[1] - _TILES[0])
    return Pace(
        cycles=steady.cycles * UNIT / useful,
        tensor_share=kernel.counts.hmma * CYCLES_PER_HMMA * warps * (_TILES[1] - _TILES[0]) / steady.cycles,
        shared_share=steady.shared_wavefronts / steady.cycles,
        issue_share=steady.issued / slots,
        lost_shares={name: count / slots for name, count in steady.lost.most_common() if count > 0},
    )


def _simulate(kernel: BackwardKernel, tiles: int, chip: Chip) -> Outcome:
    """Simulates an SM full of CTAs whose warps all execute the path `tiles` times."""
    end = dataclasses.replace(_EXIT, address=kernel.path[-1].address + 16)
    path = operations([*kernel.path * tiles, end], chip)
    return Multiprocessor(chip).run([[path] * kernel.num_warps] * kernel.residents)


def tflops(cycles: float, chip: Chip = V100) -> float:
    """Useful TFLOPS of all SMs, given their cycles for UNIT useful tensor cycles of each sub-core."""
    flops = 2 * _PRODUCTS_OF_HMMA * UNIT / CYCLES_PER_HMMA * chip.num_schedulers
    return flops / cycles * chip.num_sms * chip.clock_mhz * 1e6 * 1e-12
