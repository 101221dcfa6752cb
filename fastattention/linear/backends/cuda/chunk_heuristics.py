"""Chooses the kernels of chunked linear attention for a problem and a GPU. Pure Python: nothing here needs a device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastattention.backends.cuda.kernel_config import ARCH_FACTS
from fastattention.gpu_runtime.chips import Limits
from fastattention.linear.backends.cuda.chunk_config import (
    OutputsConfig,
    PrepareConfig,
    PrepareKeysConfig,
    StatesConfig,
    padded_headdim,
)
from fastattention.linear.problem import LinearProblem

# (tokens of a chunk, chunks in shared memory), the best first. Chunks of 64 tokens halve the steps that follow one
# another. Copies through registers have one stage, and 32 tokens leave room for a second CTA, which works while the
# first one copies.
_TILES = {True: ((64, 4), (64, 3), (32, 4), (32, 3)), False: ((32, 1), (16, 1))}  # by whether copies are asynchronous
_LONGEST_CHUNK = {64: 64, 128: 64, 256: 32}  # by headdim of keys
_OUT_COLUMNS = 64  # of v, of a CTA of outputs

# Columns of v of a CTA: more of them read less from the L2 cache, fewer leave CTAs for more multiprocessors. The time
# that a CTA takes for a chunk grows with them, but a part of it is always the same.
_MOST_STATE = 64 * 128  # numbers, in registers
_MOST_COLUMNS = 64
_FIXED_COLUMNS = 24  # that would take as long as this part


class ChunkKernels(NamedTuple):
    """The kernels of a call, in their order."""

    prepare: PrepareConfig | PrepareKeysConfig
    states: StatesConfig
    outputs: OutputsConfig


def operand_dtype(dtype: torch.dtype, arch: int) -> torch.dtype:
    """In which tensors are read: bfloat16 is float16 before Ampere."""
    return dtype if arch >= 80 else torch.float16


def choose_chunk_kernels(problem: LinearProblem, arch: int, limits: Limits) -> ChunkKernels:
    """The kernels of a chunked problem in 16 bits."""
    headdim = padded_headdim(problem.headdim_k)
    dtype = str(operand_dtype(problem.dtype, arch)).removeprefix("torch.")
    rule = "delta" if problem.delta_rule else "key" if problem.gate_per_key else "head"
    heads = problem.num_sequences * problem.nheads
    states, outputs = next(
        (states, outputs)
        for chunk, num_stages in _TILES[arch >= 80]
        if chunk <= _LONGEST_CHUNK[headdim]
        for outputs in [OutputsConfig(arch, dtype, headdim, chunk, rule, _OUT_COLUMNS)]
        if outputs.shared_bytes <= limits.shared_per_cta
        for num_steps, num_key_parts in _divisions(problem, heads, headdim, arch, limits)
        for states in [StatesConfig(arch, dtype, headdim, chunk, rule, num_steps, num_key_parts, num_stages)]
        if states.shared_bytes <= limits.shared_per_cta
    )
    prepare = (
        PrepareKeysConfig(dtype, headdim, states.chunk)
        if problem.gate_per_key
        else PrepareConfig(arch, dtype, headdim, states.chunk, problem.delta_rule)
    )
    return ChunkKernels(prepare, states, outputs)


def _divisions(
    problem: LinearProblem, heads: int, headdim: int, arch: int, limits: Limits
) -> list[tuple[int, int]]:
    """(steps of columns of v, parts of key dimensions) of a CTA, the best first, for so many heads of all sequences."""
    step_rows = ARCH_FACTS[arch].step_rows
    parts = 1 if problem.delta_rule else headdim // 64
    most = min(_MOST_COLUMNS, _MOST_STATE * parts // headdim)

    def cost(num_steps: int) -> int:
        columns = num_steps * step_rows
        waves = -(-heads * parts * -(-problem.headdim_v // columns) // limits.num_sms)
        return waves * (_FIXED_COLUMNS + columns)

    return [(n, parts) for n in sorted((n for n in (1, 2, 4) if n == 1 or n * step_rows <= most), key=cost)]
