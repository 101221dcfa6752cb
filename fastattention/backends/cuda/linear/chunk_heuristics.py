"""Chooses the kernels of chunked linear attention for a problem and a GPU. Pure Python: nothing here needs a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.backends.cuda.common.dtype_codes import DTYPE_CODES
from fastattention.backends.cuda.linear.chunk_config import (
    ChunkVariant,
    KeyGradientsConfig,
    OutputsConfig,
    PrepareConfig,
    PrepareKeysConfig,
    StateGradientsConfig,
    StatesConfig,
    TokenGradientsConfig,
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

# (columns of v, slices of so many in shared memory) of gradients of tokens, the best first
_SLICES = (64, 2), (64, 1), (32, 2), (32, 1)


class ChunkKernels(NamedTuple):
    """The kernels of a call, in their order."""

    prepare: PrepareConfig | PrepareKeysConfig
    states: StatesConfig
    outputs: OutputsConfig


class GradientKernels(NamedTuple):
    """The kernels of gradients. The first two are those of a call. Delta rules launch `updates` before `chain`."""

    prepare: PrepareConfig | PrepareKeysConfig
    states: StatesConfig
    chain: StatesConfig | StateGradientsConfig
    updates: OutputsConfig
    tokens: TokenGradientsConfig | KeyGradientsConfig


def operand_dtype(dtype: torch.dtype, arch: int) -> torch.dtype:
    """The dtype in which tensors are read: before Ampere, bfloat16 is converted to float16."""
    return dtype if arch >= 80 else torch.float16


def choose_chunk_kernels(problem: LinearProblem, arch: int, limits: Limits) -> ChunkKernels:
    """The kernels of a chunked problem in 16 bits."""
    return next(
        ChunkKernels(_prepare(problem, common), states, outputs)
        for common in _all_common(problem, arch)
        for states in _fitting(_states(problem, limits, common), limits)
        for outputs in _fitting((OutputsConfig(*common, columns) for columns in _OUT_COLUMNS), limits)
    )


def choose_gradient_kernels(problem: LinearProblem, arch: int, limits: Limits) -> GradientKernels | None:
    """The kernels of gradients of a problem in 16 bits. None when they do not fit the GPU."""
    return next(
        (
            GradientKernels(_prepare(problem, common), states, chain, updates, tokens)
            for common in _all_common(problem, arch)
            for states in _fitting(_states(problem, limits, common), limits)
            for chain in _fitting(_gradient_chains(problem, limits, common), limits)
            for updates in _fitting((OutputsConfig(*common, columns, True) for columns in _OUT_COLUMNS), limits)
            for tokens in _fitting(_token_gradients(problem, common), limits)
        ),
        None,
    )


class _Common(NamedTuple):
    """The first fields of all configurations of a call."""

    arch: int
    dtype: torch.dtype
    headdim: int
    chunk: int
    rule: str


def _all_common(problem: LinearProblem, arch: int) -> Iterator[_Common]:
    """The best first."""
    headdim = padded_headdim(problem.headdim_k)
    rule = (("head", "key"), ("delta", "kda"))[problem.delta_rule][problem.gate_per_key]
    has_long_chunks = arch >= 80 and headdim <= _WIDEST_OF_LONG_CHUNKS
    for chunk in (_LONG_CHUNK, _CHUNK) if has_long_chunks else (_CHUNK,):
        yield _Common(arch, operand_dtype(problem.dtype, arch), headdim, chunk, rule)


_Variant = TypeVar("_Variant", bound=ChunkVariant)


def _fitting(configs: Iterable[_Variant], limits: Limits) -> list[_Variant]:
    """The first configuration whose shared memory the GPU has, if any."""
    return list(itertools.islice((x for x in configs if x.shared_bytes <= limits.shared_per_cta), 1))


def _prepare(problem: LinearProblem, common: _Common) -> PrepareConfig | PrepareKeysConfig:
    if problem.gate_per_key:
        return PrepareKeysConfig(*common, DTYPE_CODES[problem.gate_dtype])
    return PrepareConfig(*common)


def _chains(problem: LinearProblem, limits: Limits, common: _Common) -> Iterator[tuple[int, int, int]]:
    """(num_steps, num_key_parts, num_stages) of kernels that go from chunk to chunk, the best first."""
    for num_steps, num_key_parts in _divisions(problem, common.headdim, common.arch, limits):
        for num_stages in _STAGES[problem.delta_rule] if common.arch >= 80 else (1,):
            yield num_steps, num_key_parts, num_stages


def _states(problem: LinearProblem, limits: Limits, common: _Common) -> Iterator[StatesConfig]:
    return (StatesConfig(*common, *chain) for chain in _chains(problem, limits, common))


def _gradient_chains(
    problem: LinearProblem, limits: Limits, common: _Common
) -> Iterator[StatesConfig | StateGradientsConfig]:
    for chain in _chains(problem, limits, common):
        yield StateGradientsConfig(*common, *chain) if problem.delta_rule else StatesConfig(*common, *chain, True)


def _token_gradients(problem: LinearProblem, common: _Common) -> Iterator[TokenGradientsConfig | KeyGradientsConfig]:
    for rows_early, (columns, num_stages) in itertools.product((True, False), _SLICES):
        if num_stages > 1 and common.arch < 80:
            continue
        if problem.gate_per_key:
            yield KeyGradientsConfig(*common, columns, num_stages, DTYPE_CODES[problem.gate_dtype])
        else:
            yield TokenGradientsConfig(*common, columns, num_stages, rows_early)


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
