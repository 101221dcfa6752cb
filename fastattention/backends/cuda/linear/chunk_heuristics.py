"""Chooses the kernels of chunked linear attention for a problem and a GPU. Pure Python: nothing here needs a device."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.backends.cuda.common.dtype_codes import DTYPE_CODES
from fastattention.backends.cuda.linear.chunk_config import (
    OutputsConfig,
    PrepareConfig,
    PrepareKeysConfig,
    StatesConfig,
    padded_headdim,
)
from fastattention.gpu_runtime.chips import Limits
from fastattention.linear.problem import LinearProblem

# Tokens of a chunk. Chunks of 64 tokens halve the number of sequential steps. Copies through registers have one stage.
# There, 32 tokens make room for a second CTA, which works while the first one copies. KDA has two tiles of keys: with
# 99 KB of shared memory and headdims above 64, two of its long chunks do not fit.
_LONG_CHUNK, _CHUNK = 64, 32
_WIDEST_OF_LONG_CHUNKS = 128  # largest headdim of keys with long chunks

# Chunks in shared memory, the most first: the first number that fits is taken. The delta rule takes longer for a chunk.
_STAGES = {True: (4, 3, 2), False: (8, 7, 6, 5, 4, 3)}  # True: the delta rule

# Elements of the state of a CTA. With more of them, less is read from the L2 cache. With fewer, there are CTAs for more
# multiprocessors. The time of a chunk is a fixed part and a part that grows with them.
_MOST_STATE = 64 * 128  # elements that fit registers
_FIXED_STATE = 24 * 128  # elements that take as long as the fixed part
_STEPS = 1, 2, 4  # steps of columns of v of a CTA of states
_MOST_COLUMNS = 64
_FEWEST_KEYS = 64

_OUT_COLUMNS = 64, 32  # columns of v of a CTA of outputs, the best first


class ChunkKernels(NamedTuple):
    """The kernels of a call, in their order."""

    prepare: PrepareConfig | PrepareKeysConfig
    states: StatesConfig
    outputs: OutputsConfig


def operand_dtype(dtype: torch.dtype, arch: int) -> torch.dtype:
    """The dtype in which tensors are read: before Ampere, bfloat16 is converted to float16."""
    return dtype if arch >= 80 else torch.float16


def choose_chunk_kernels(problem: LinearProblem, arch: int, limits: Limits) -> ChunkKernels:
    """The kernels of a chunked problem in 16 bits."""
    headdim = padded_headdim(problem.headdim_k)
    rule = (("head", "key"), ("delta", "kda"))[problem.delta_rule][problem.gate_per_key]
    has_long_chunks = arch >= 80 and headdim <= _WIDEST_OF_LONG_CHUNKS
    dtype = operand_dtype(problem.dtype, arch)
    states = next(
        config
        for chunk in ((_LONG_CHUNK, _CHUNK) if has_long_chunks else (_CHUNK,))
        for num_steps, num_key_parts in _divisions(problem, headdim, arch, limits)
        for num_stages in (_STAGES[problem.delta_rule] if arch >= 80 else (1,))
        for config in [StatesConfig(arch, dtype, headdim, chunk, rule, num_steps, num_key_parts, num_stages)]
        if config.shared_bytes <= limits.shared_per_cta
    )
    common = arch, dtype, headdim, states.chunk, rule
    outputs = next(
        config
        for columns in _OUT_COLUMNS
        for config in [OutputsConfig(*common, columns)]
        if config.shared_bytes <= limits.shared_per_cta
    )
    gate_format = DTYPE_CODES[problem.gate_dtype]
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
        return waves * (_FIXED_STATE + columns * keys), columns + keys  # copied for each token of a chunk

    parts = [1] if problem.delta_rule else [parts for parts in (1, 2, 4) if headdim // parts >= _FEWEST_KEYS]
    divisions = itertools.product(_STEPS, parts)
    most = {n: _MOST_STATE * n // headdim for n in parts}
    return sorted((d for d in divisions if d[0] == 1 or d[0] * step_rows <= min(_MOST_COLUMNS, most[d[1]])), key=cost)
