"""Serves chunked linear attention by three kernels.

The first computes what depends on no state, for all chunks at once. The second computes states, chunk after chunk, and
the third outputs of all chunks at once. The state before each chunk is kept until then: 512 bytes of scratch for each
token and head, with chunks of 64 tokens and 128 x 128 elements a state. Delta rules take 256 more for updates. With a
gate for every key dimension, queries and keys times gates take 512, and 256 more with the delta rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import first_strides, named_strides, pointers, token_strides
from fastattention.backends.cuda.common.dtype_codes import DTYPE_CODES
from fastattention.backends.cuda.common.memory import aligned_as, check_float16_range
from fastattention.backends.cuda.linear.chunk_config import (
    ChainConfig,
    ChunkVariant,
    OutputsConfig,
    PrepareConfig,
    PrepareKeysConfig,
)
from fastattention.backends.cuda.linear.chunk_heuristics import choose_chunk_kernels, operand_dtype
from fastattention.backends.cuda.linear.params import ChunkParams
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

Launcher = Callable[[Params], None]


class ChunkedCall:
    """Serves calls of a chunked problem in 16 bits whose tensors have the strides of the first call."""

    def __init__(
        self, problem: LinearProblem, arch: int, limits: Limits, launcher: Callable[[KernelLaunch], Launcher]
    ) -> None:
        """launcher: gives a function that enqueues a kernel."""
        self._problem, self._dtype = problem, operand_dtype(problem.dtype, arch)
        kernels = choose_chunk_kernels(problem, arch, limits)
        self._columns_v = padded(problem.headdim_v)
        scratch = scratch_sizes(problem, kernels.prepare)
        *self._offsets, self._scratch_bytes = itertools.accumulate(scratch.values(), initial=0)
        self._num_slots = num_slots(problem, kernels.prepare.chunk)
        self._template_as_given: bytes | None = None  # for calls whose tensors kernels read without a copy
        self._make = ChunkParams.maker(*LinearInputs._fields, "out", "final_state", *scratch)
        grids = ((config, num_ctas(problem, config)) for config in kernels)
        self._launchers = [launcher(KernelLaunch(config, 0, count)) for config, count in grids if count]

    def __call__(self, inputs: LinearInputs) -> LinearOutput:
        """(out, final state)."""
        problem = self._problem
        check_float16_range(self._dtype, "torch", q=inputs.q, k=inputs.k, v=inputs.v)
        given = inputs
        q, k, v = (aligned_as(tensor, self._dtype) for tensor in inputs[:3])
        if problem.gate_per_key:  # prepare_keys.cuh reads four gates at once
            inputs = inputs._replace(g=aligned_as(inputs.g, inputs.g.dtype))
        as_given = q is given.q and k is given.k and v is given.v and inputs.g is given.g
        template = self._template_as_given if as_given else None
        if template is None:
            template = chunk_template(problem, self._num_slots, inputs._replace(q=q, k=k, v=v))
            self._template_as_given = template if as_given else self._template_as_given
        out = q.new_empty((*problem.out_shape[:3], self._columns_v))
        final_state = q.new_empty(problem.state_shape, dtype=torch.float32) if problem.returns_state else None
        scratch = q.new_empty(self._scratch_bytes, dtype=torch.uint8)
        (first,) = pointers(scratch)
        params = self._make(
            template,
            *pointers(q, k, v, *inputs[3:], out, final_state),
            *(first + offset for offset in self._offsets),
        )
        for launch in self._launchers:
            launch(params)
        if (out.shape, out.dtype) != (problem.out_shape, problem.dtype):
            out = out[..., : problem.headdim_v].to(problem.dtype).contiguous()
        return LinearOutput(out, final_state)


def chunk_template(problem: LinearProblem, num_slots: int, inputs: LinearInputs) -> bytes:
    """ChunkParams of calls with these aligned tensors, without addresses."""
    return ChunkParams.template(
        **named_strides("q", token_strides(inputs.q)),
        **named_strides("k", token_strides(inputs.k)),
        **named_strides("v", token_strides(inputs.v)),
        **named_strides("g", first_strides(inputs.g)),
        **named_strides("beta", first_strides(inputs.beta)),
        **named_strides("state", first_strides(inputs.initial_state), "sequence head key"),
        num_sequences=problem.num_sequences,
        seqlen=problem.seqlen,
        num_slots=num_slots,
        nheads=problem.nheads,
        group_size=problem.group_size,
        headdim_k=problem.headdim_k,
        headdim_v=problem.headdim_v,
        columns_k=inputs.q.shape[-1],
        columns_v=padded(problem.headdim_v),
        gate_format=DTYPE_CODES[problem.gate_dtype],
        beta_format=DTYPE_CODES[problem.beta_dtype or torch.float32],
        normalizes=problem.l2norm,
        scale=problem.scale,
    )


def padded(columns: int) -> int:
    """Columns of rows of so many elements in memory that kernels read and write."""
    return -(-columns // 8) * 8


def scratch_sizes(problem: LinearProblem, prepare: PrepareConfig | PrepareKeysConfig) -> dict[str, int]:
    """Bytes of scratch memory of a call, by the fields of ChunkParams (kernels/chunk_params.h)."""
    columns_v, square = padded(problem.headdim_v), prepare.chunk**2
    tokens = prepare.chunk * prepare.headdim * problem.gate_per_key
    of_a_slot = {
        "scores": 2 * square, "inverse": 2 * square * problem.delta_rule, "factors": 4 * prepare.num_factors,
        "q_scaled": 2 * tokens, "k_scaled": 2 * tokens * (1 + problem.delta_rule),
        "states": 2 * columns_v * prepare.headdim, "updates": 2 * columns_v * prepare.chunk * problem.delta_rule,
    }  # fmt: skip
    slots = problem.nheads * num_slots(problem, prepare.chunk)
    return {name: slots * size for name, size in of_a_slot.items()}


def num_ctas(problem: LinearProblem, config: ChunkVariant) -> int:
    """CTAs of a kernel of a call: for chunks of all heads, or for parts of their states."""
    if isinstance(config, ChainConfig):
        state_parts = -(-problem.headdim_v // config.value_columns) * config.num_key_parts
        return problem.num_sequences * problem.nheads * state_parts
    parts = -(-problem.headdim_v // config.columns) if isinstance(config, OutputsConfig) else 1
    return problem.nheads * num_slots(problem, config.chunk) * parts


def num_slots(problem: LinearProblem, chunk: int) -> int:
    """Chunks that scratch of a head has room for: the most that a varlen call can have (kernels/chunk.cuh)."""
    if problem.varlen:
        return problem.seqlen // chunk + problem.num_sequences
    return problem.batch_size * -(-problem.seqlen // chunk)
