"""Chooses the kernels of chunked linear attention for a problem and a GPU. Pure Python: nothing here needs a device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastattention.backends.cuda.kernel_config import ARCH_FACTS
from fastattention.gpu_runtime.chips import Limits
from fastattention.linear.backends.cuda.chunk_config import (
    PrepareConfig,
    PrepareKeysConfig,
    ScanConfig,
    padded_headdim,
)
from fastattention.linear.problem import LinearProblem

# (tokens of a chunk, chunks in shared memory), the best first. Chunks of 64 tokens halve the steps that follow one
# another; beside a state of 256 key dimensions there are registers for 32. Copies through registers have one stage, and
# 32 tokens leave room for a second CTA, which works while the first one copies.
_TILES = {True: ((64, 2), (32, 2), (32, 1)), False: ((32, 1),)}  # by whether copies are asynchronous
_LONGEST_CHUNK = {64: 64, 128: 64, 256: 32}  # by headdim of keys

# Warps of a CTA share tiles: more of them read less from the L2 cache. Fewer leave CTAs for more multiprocessors.
_FEWEST_WARPS = {True: 2, False: 4}
_MOST_WARPS = 8


class ChunkKernels(NamedTuple):
    """The kernels of a call."""

    prepare: PrepareConfig | PrepareKeysConfig
    scan: ScanConfig
    num_parts: int  # CTAs that share the columns of v of a head


def operand_dtype(dtype: torch.dtype, arch: int) -> torch.dtype:
    """In which tensors are read: bfloat16 is float16 before Ampere."""
    return dtype if arch >= 80 else torch.float16


def choose_chunk_kernels(problem: LinearProblem, arch: int, limits: Limits) -> ChunkKernels:
    """The kernels of a chunked problem in 16 bits."""
    headdim = padded_headdim(problem.headdim_k)
    dtype = str(operand_dtype(problem.dtype, arch)).removeprefix("torch.")
    rule = "delta" if problem.delta_rule else "key" if problem.gate_per_key else "head"
    steps = -(-problem.headdim_v // ARCH_FACTS[arch].step_rows)
    num_warps = _num_warps(steps, problem.num_sequences * problem.nheads, arch, limits)
    scan = next(
        config
        for chunk, num_stages in _TILES[arch >= 80]
        if chunk <= _LONGEST_CHUNK[headdim]
        for config in [ScanConfig(arch, dtype, headdim, chunk, rule, num_warps, num_stages)]
        if config.shared_bytes <= limits.shared_per_cta
    )
    prepare = (
        PrepareKeysConfig(dtype, headdim, scan.chunk)
        if problem.gate_per_key
        else PrepareConfig(arch, dtype, headdim, scan.chunk, problem.delta_rule)
    )
    return ChunkKernels(prepare, scan, -(-steps // num_warps))


def _num_warps(steps: int, num_heads: int, arch: int, limits: Limits) -> int:
    """Warps of a CTA for so many steps of columns of v, and heads of all sequences: a power of two."""
    per_sm = -(-steps * num_heads // limits.num_sms)
    return _power_of_two(min(max(per_sm, _FEWEST_WARPS[arch >= 80]), steps, _MOST_WARPS))


def _power_of_two(x: int) -> int:
    """The next that is not less."""
    return 1 << max(x - 1, 0).bit_length()
