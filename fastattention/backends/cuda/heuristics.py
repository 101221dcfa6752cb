"""Which variant of the kernel serves a call: pure Python, no device needed.

`choose_config` maps (Problem, code path, limits of the GPU) to a KernelConfig. `why_not_fitting` says why a
configuration does not fit a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastattention.backends.cuda.chips import Limits
from fastattention.errors import CompileError
from fastattention.problem import Problem

MAX_HEADDIM = 256
MAX_REGISTERS = 255  # of a thread, on every GPU


class _ArchFacts(NamedTuple):
    """What kernels/arch/sm*.cuh say of themselves."""

    step_rows: int  # query rows that a warp's matrix instruction takes
    elements: int  # floats a lane holds of step_rows x 8 accumulators
    shared_bytes: int  # of an element in shared memory


ARCH_FACTS = {
    60: _ArchFacts(16, 4, 4),
    70: _ArchFacts(32, 8, 2),
    75: _ArchFacts(16, 4, 2),
    80: _ArchFacts(16, 4, 2),
}


@dataclass(frozen=True)
class KernelConfig:
    """One variant of kernels/forward.cuh. Hashable; two equal configurations are the same machine code."""

    arch: int  # code path: 60, 70, 75 or 80
    dtype: str  # "float16" or "bfloat16"
    headdim: int  # columns of a tile of queries and keys; the call's headdim may be less
    headdim_v: int  # likewise, of a CTA
    tile_m: int  # query rows of a CTA
    tile_n: int  # keys of a tile
    num_warps: int
    num_stages: int  # tiles of keys, and of values, in shared memory
    min_blocks: int  # CTAs of a multiprocessor for which the compiler leaves registers
    queries_in_registers: bool  # otherwise they are read from shared memory for every tile of keys
    num_value_parts: int  # CTAs that share the columns of v, where one has too few registers for all
    modifies_scores: bool  # softcap, ALiBi or bias, or a softmax_scale that is not positive
    paged: bool

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; kernels/forward.cuh asserts the same."""
        size = ARCH_FACTS[self.arch].shared_bytes
        query_pitch, value_pitch = _pitch(self.headdim, size), _pitch(self.headdim_v, size)
        queries = self.tile_m * max(query_pitch, _pitch(self.headdim_v, 2))
        return queries + self.num_stages * self.tile_n * (query_pitch + value_pitch)

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold scores, results and queries; the rest of a kernel takes about 40 more."""
        facts = ARCH_FACTS[self.arch]
        steps = self.tile_m // (self.num_warps * facts.step_rows)
        queries = self.headdim * facts.step_rows // 64 if self.queries_in_registers else 0
        return steps * ((self.tile_n + self.headdim_v) // 8 * facts.elements + queries)

    @property
    def name(self) -> str:
        """A readable name, unique among configurations."""
        parts = f"p{self.num_value_parts}" * (self.num_value_parts > 1)
        flags = "q" * self.queries_in_registers + parts + "_scores" * self.modifies_scores + "_paged" * self.paged
        return (
            f"forward_sm{self.arch}_{self.dtype}_d{self.headdim}x{self.headdim_v}"
            f"_m{self.tile_m}n{self.tile_n}w{self.num_warps}s{self.num_stages}b{self.min_blocks}{flags}"
        )

    def macros(self) -> dict[str, str]:
        """What kernels/variant.cuh is compiled with."""
        return {
            "FA_ARCH_HEADER": f'"arch/sm{self.arch}.cuh"',
            "FA_BFLOAT16": str(int(self.dtype == "bfloat16")),
            "FA_HEADDIM": str(self.headdim),
            "FA_HEADDIM_V": str(self.headdim_v),
            "FA_TILE_M": str(self.tile_m),
            "FA_TILE_N": str(self.tile_n),
            "FA_WARPS": str(self.num_warps),
            "FA_STAGES": str(self.num_stages),
            "FA_MIN_BLOCKS": str(self.min_blocks),
            "FA_QUERIES_IN_REGISTERS": str(int(self.queries_in_registers)),
            "FA_VALUE_PARTS": str(self.num_value_parts),
            "FA_MODIFIES": str(int(self.modifies_scores)),
            "FA_PAGED": str(int(self.paged)),
            "FA_SHARED_BYTES": str(self.shared_bytes),
        }


def _pitch(columns: int, element_bytes: int) -> int:
    """Bytes of a row in shared memory (kernels/shared_tile.cuh)."""
    return columns * element_bytes + 16


class _Tiles(NamedTuple):
    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    min_blocks: int
    queries_in_registers: bool
    num_value_parts: int = 1
    max_seqlen_q: int | None = None  # calls with more queries prefer another
    serves_scores: bool = True  # has registers to spare for modified scores


# For head dimensions up to the key, the candidates, best first: the first that suits the call and fits the GPU is
# taken (docs/experiments.md). The first ones of 80 and 75 were chosen on an H200, those of 70 by the predictions of
# benchmarks/volta_model, the others by counting: as many warps, and as few reads of shared memory, as then fit.
_TILES: dict[int, dict[int, tuple[_Tiles, ...]]] = {
    80: {
        64: (
            _Tiles(128, 32, 4, 2, 3, False, max_seqlen_q=8191, serves_scores=False),
            _Tiles(192, 48, 4, 2, 2, False, serves_scores=False),
            _Tiles(128, 64, 4, 2, 2, False),
            _Tiles(128, 64, 4, 1, 2, False),
        ),
        128: (
            _Tiles(128, 64, 4, 1, 2, False, serves_scores=False),
            _Tiles(128, 64, 8, 1, 1, True, serves_scores=False),
            _Tiles(128, 32, 4, 1, 2, False),
            _Tiles(128, 32, 8, 1, 1, True),
        ),
        192: (_Tiles(128, 64, 8, 2, 1, True), _Tiles(64, 32, 4, 1, 1, True)),
        256: (_Tiles(128, 32, 8, 2, 1, True), _Tiles(64, 32, 4, 1, 1, False)),
    },
    75: {
        64: (_Tiles(128, 64, 4, 1, 2, False), _Tiles(128, 32, 4, 1, 2, True)),
        128: (_Tiles(128, 32, 4, 1, 2, False), _Tiles(128, 32, 8, 1, 1, True)),
        192: (_Tiles(64, 32, 4, 1, 1, False),),
        256: (_Tiles(64, 16, 4, 1, 1, False),),
    },
    70: {
        64: (
            _Tiles(64, 32, 2, 1, 2, False, max_seqlen_q=64),
            _Tiles(128, 64, 4, 1, 2, False),
        ),
        128: (
            _Tiles(64, 16, 2, 1, 2, False, max_seqlen_q=64),
            _Tiles(128, 16, 4, 1, 1, False, max_seqlen_q=128),
            _Tiles(256, 32, 8, 1, 1, False, serves_scores=False),
            _Tiles(256, 16, 8, 1, 1, False),
        ),
        192: (_Tiles(64, 16, 2, 1, 1, False, 2, max_seqlen_q=64), _Tiles(128, 32, 4, 1, 1, False, 2)),
        256: (_Tiles(64, 8, 2, 1, 1, False, 2, max_seqlen_q=64), _Tiles(128, 16, 4, 1, 1, False, 2)),
    },
    60: {
        64: (_Tiles(64, 32, 4, 1, 1, False),),
        128: (_Tiles(32, 16, 2, 1, 1, False),),
        256: (_Tiles(16, 8, 1, 1, 1, False),),
    },
}


def representative_seqlens() -> list[int]:
    """Numbers of queries, one for every choice that depends on them; the last is a long sequence."""
    tiles = (sizes for by_headdim in _TILES.values() for candidates in by_headdim.values() for sizes in candidates)
    limits = {sizes.max_seqlen_q for sizes in tiles if sizes.max_seqlen_q is not None}
    return [*sorted(limits), max(limits) + 1]


def padded_headdim(headdim: int) -> int:
    """Columns of a tile for a head dimension: 32, 64, 96, 128, 192 or 256, so that variants stay few."""
    return next(size for size in (32, 64, 96, 128, 192, MAX_HEADDIM) if headdim <= size)


def why_not_fitting(config: KernelConfig, limits: Limits) -> str | None:
    """Why a GPU cannot run a configuration, or None."""
    if config.shared_bytes > limits.shared_per_block:
        return f"{config.shared_bytes} bytes of shared memory, the GPU has {limits.shared_per_block} a CTA"
    if config.min_blocks * config.shared_bytes > limits.shared_per_sm:
        return f"{config.min_blocks} CTAs of {config.shared_bytes} bytes, the GPU has {limits.shared_per_sm}"
    registers = limits.registers_per_sm // (config.num_threads * config.min_blocks)
    if config.accumulators > min(registers, MAX_REGISTERS) - 24:
        return f"{config.accumulators} registers of accumulators, a thread has {min(registers, MAX_REGISTERS)}"
    return None


def configs_for(
    arch: int, dtype: str, headdim: int, headdim_v: int, seqlen_q: int, modifies_scores: bool, paged: bool
) -> list[KernelConfig]:
    """The candidates for a call, best first: those for fewer queries serve it too, if nothing else fits the GPU."""
    columns = padded_headdim(headdim), padded_headdim(headdim_v)
    tiles = next(tiles for limit, tiles in _TILES[arch].items() if max(columns) <= limit)
    by_preference = sorted(tiles, key=lambda sizes: sizes.max_seqlen_q is not None and seqlen_q > sizes.max_seqlen_q)
    return [
        KernelConfig(
            arch=arch,
            dtype=dtype,
            headdim=columns[0],
            headdim_v=columns[1] // sizes.num_value_parts,
            tile_m=sizes.tile_m,
            tile_n=sizes.tile_n,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            min_blocks=sizes.min_blocks,
            queries_in_registers=sizes.queries_in_registers,
            num_value_parts=sizes.num_value_parts,
            modifies_scores=modifies_scores,
            paged=paged,
        )
        for sizes in by_preference
        if sizes.serves_scores or not modifies_scores
    ]


def choose_config(problem: Problem, arch: int, limits: Limits) -> KernelConfig:
    """The configuration for a problem on a GPU. Raises CompileError when none fits."""
    dtype = "bfloat16" if problem.dtype is torch.bfloat16 and arch >= 80 else "float16"
    modifies = problem.softcap != 0.0 or problem.has_alibi or problem.has_bias or problem.softmax_scale <= 0.0
    candidates = configs_for(
        arch, dtype, problem.headdim, problem.headdim_v, problem.seqlen_q, modifies, problem.is_paged
    )
    reasons = []
    for config in candidates:
        reason = why_not_fitting(config, limits)
        if reason is None:
            return config
        reasons.append(f"{config.name}: {reason}")
    raise CompileError(f"no kernel fits compute capability {limits.target / 10:.1f}: {'; '.join(reasons)}")


def heads_together(problem: Problem, limits: Limits) -> int:
    """Query heads whose CTAs start together: their keys and values fill at most three quarters of the L2 cache.

    Whole groups that share a key head, and as many each time, so that the last ones fill the GPU too.
    """
    key_head_bytes = problem.seqlen_k * (problem.headdim + problem.headdim_v) * 2
    most = max(1, limits.l2_bytes * 3 // 4 // max(key_head_bytes, 1))
    key_heads = max(1, problem.nheads_k * problem.batch_size)
    num_rounds = -(-key_heads // most)
    return -(-key_heads // num_rounds) * problem.group_size
