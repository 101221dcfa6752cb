"""Chooses the kernels of chunked linear attention for a problem and a GPU. Pure Python: nothing here needs a device."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.backends.cuda.linear.chunk_config import (
    OutputsConfig,
    PrepareConfig,
    PrepareKeysConfig,
    StatesConfig,
    padded_headdim,
)
from fastattention.backends.cuda.linear.params import GATE_FORMATS
from fastattention.gpu_runtime.chips import Limits
from fastattention.linear.problem import LinearProblem

# Tokens of a chunk: 64 halve the steps that follow one another. Copies through registers have one stage, and 32 tokens
# leave room for a second CTA, which works while the first one copies.
_LONG_CHUNK, _CHUNK = 64, 32
_WIDEST_OF_LONG_CHUNKS = 128  # headdim of keys

# Chunks in shared memory, the most first: as many as there is room for. The delta rule takes longer for a chunk.
_STAGES = {True: (4, 3, 2), False: (8, 7, 6, 5, 4, 3)}  # by whether it is the delta rule

# Numbers of the state of a CTA: more of them read less from the L2 cache, fewer leave CTAs for more multiprocessors.
# The time that a CTA takes for a chunk grows with them, but a part of it is always the same.
_MOST_STATE = 64 * 128  # in registers
_FIXED_STATE = 24 * 128  # that would take as long as this part
_STEPS = 1, 2, 4  # of columns of v
_MOST_COLUMNS = 64
_FEWEST_KEYS = 64

_OUT_COLUMNS = 64, 32  # of v, of a CTA of outputs, the best first


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
    rule = "delta" if problem.delta_rule else "key" if problem.gate_per_key else "head"
    chunk = _LONG_CHUNK if arch >= 80 and headdim <= _WIDEST_OF_LONG_CHUNKS else _CHUNK
    common = arch, operand_dtype(problem.dtype, arch), headdim, chunk, rule
    states = next(
        config
        for num_steps, num_key_parts in _divisions(problem, headdim, arch, limits)
        for num_stages in (_STAGES[problem.delta_rule] if arch >= 80 else (1,))
        for config in [StatesConfig(*common, num_steps, num_key_parts, num_stages)]
        if config.shared_bytes <= limits.shared_per_cta
    )
    outputs = next(
        config
        for columns in _OUT_COLUMNS
        for config in [OutputsConfig(*common, columns)]
        if config.shared_bytes <= limits.shared_per_cta
    )
    gate_format = GATE_FORMATS[problem.gate_dtype]
    prepare = PrepareKeysConfig(*common, gate_format) if problem.gate_per_key else PrepareConfig(*common)
    return ChunkKernels(prepare, states, outputs)


def _divisions(problem: LinearProblem, headdim: int, arch: int, limits: Limits) -> list[tuple[int, int]]:
    """(steps of columns of v of a CTA, CTAs that share the key dimensions), the best first."""
    step_rows = ARCH_FACTS[arch].step_rows
    heads = problem.num_sequences * problem.nheads

    def cost(division: tuple[int, int]) -> tuple[int, int]:
        columns, parts = division[0] * step_rows, division[1]
        keys = headdim // parts
        waves = -(-heads * parts * -(-problem.headdim_v // columns) // limits.num_sms)
        return waves * (_FIXED_STATE + columns * keys), columns + keys  # which a chunk copies for each token

    parts = [1] if problem.delta_rule else [parts for parts in (1, 2, 4) if headdim // parts >= _FEWEST_KEYS]
    divisions = itertools.product(_STEPS, parts)
    most = {n: _MOST_STATE * n // headdim for n in parts}
    return sorted((d for d in divisions if d[0] == 1 or d[0] * step_rows <= min(_MOST_COLUMNS, most[d[1]])), key=cost)
