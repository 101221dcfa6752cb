"""Serves chunked linear attention by three kernels.

What depends on no state is computed for all chunks at once, then states chunk after chunk, then outputs of all chunks
at once. States before all chunks are kept until then: with 64 tokens a chunk and 128 x 128 numbers a head that is
512 bytes a token and head of scratch, and 256 more of updates for the delta rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from fastattention.backends.common.layout import first_strides, pointers, token_strides
from fastattention.backends.cuda.linear.chunk_config import factors_of_chunk
from fastattention.backends.cuda.linear.chunk_heuristics import choose_chunk_kernels, operand_dtype
from fastattention.backends.cuda.linear.chunk_params import ChunkParams
from fastattention.backends.cuda.linear.params import GATE_FORMATS
from fastattention.backends.cuda.memory import aligned_as, check_float16_range
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

Launcher = Callable[[ChunkParams], None]


class ChunkedCall:
    """How calls of a chunked problem in 16 bits are served. Keeps nothing of a call."""

    def __init__(
        self, problem: LinearProblem, arch: int, limits: Limits, launcher: Callable[[KernelLaunch], Launcher]
    ) -> None:
        """launcher: gives what enqueues a kernel."""
        self._problem, self._dtype = problem, operand_dtype(problem.dtype, arch)
        _, states, outputs = kernels = choose_chunk_kernels(problem, arch, limits)
        self._num_slots = _num_slots(problem, states.chunk)
        self._columns_v = -(-problem.headdim_v // 8) * 8
        heads, square = problem.nheads * self._num_slots, states.chunk**2
        tokens = states.chunk * states.headdim * problem.gate_per_key
        factors = states.headdim if problem.gate_per_key else factors_of_chunk(states.chunk)
        state, updates = self._columns_v * states.headdim, self._columns_v * states.chunk * problem.delta_rule
        # Bytes of scratch in the order of ChunkParams.
        sizes = 2 * square, 2 * square * problem.delta_rule, 4 * factors, 2 * tokens, 2 * tokens, 2 * state, 2 * updates
        *self._offsets, self._scratch_bytes = itertools.accumulate((heads * size for size in sizes), initial=0)
        state_parts = -(-problem.headdim_v // states.columns) * states.num_key_parts
        grids = (
            heads,
            problem.num_sequences * problem.nheads * state_parts,
            heads * -(-problem.headdim_v // outputs.columns),
        )
        self._launchers = [
            launcher(KernelLaunch(config, 0, num_ctas))
            for config, num_ctas in zip(kernels, grids, strict=True)
            if num_ctas
        ]

    def __call__(self, inputs: LinearInputs) -> LinearOutput:
        """(out, final state)."""
        problem = self._problem
        check_float16_range(self._dtype, "torch", q=inputs.q, k=inputs.k, v=inputs.v)
        q, k, v = (aligned_as(tensor, self._dtype) for tensor in inputs[:3])
        if problem.gate_per_key:  # prepare_keys.cuh reads four of them at once
            inputs = inputs._replace(g=aligned_as(inputs.g, inputs.g.dtype))
        out = q.new_empty((*problem.out_shape[:3], self._columns_v))
        final_state = q.new_empty(problem.state_shape, dtype=torch.float32) if problem.returns_state else None
        scratch = q.new_empty(self._scratch_bytes, dtype=torch.uint8)
        (first,) = pointers(scratch)
        params = ChunkParams.make(
            self._template(q, k, v, inputs),
            *pointers(q, k, v, inputs.g, inputs.beta, inputs.initial_state, inputs.cu_seqlens, out, final_state),
            *(first + offset for offset in self._offsets),
        )
        for launch in self._launchers:
            launch(params)
        if (out.shape, out.dtype) != (problem.out_shape, problem.dtype):
            out = out[..., : problem.headdim_v].to(problem.dtype, memory_format=torch.contiguous_format)
        return LinearOutput(out, final_state)

    def _template(self, q: Tensor, k: Tensor, v: Tensor, inputs: LinearInputs) -> bytes:
        problem = self._problem
        (q_batch, q_row, q_head), (k_batch, k_row, k_head), (v_batch, v_row, v_head) = map(token_strides, (q, k, v))
        gates = *first_strides(inputs.g), *first_strides(inputs.beta)
        return ChunkParams.template(
            q_batch, q_head, k_batch, k_head, v_batch, v_head, *gates,
            *first_strides(inputs.initial_state), q_row, k_row, v_row,
            problem.num_sequences, problem.seqlen, self._num_slots, problem.nheads, problem.group_size,
            problem.headdim_k, problem.headdim_v, q.shape[-1], self._columns_v,
            GATE_FORMATS[problem.gate_dtype], GATE_FORMATS[problem.beta_dtype], problem.l2norm, problem.scale,
        )  # fmt: skip


def _num_slots(problem: LinearProblem, chunk: int) -> int:
    """Chunks that scratch of a head has room for; of varlen the most there can be (kernels/chunk.cuh)."""
    if problem.varlen:
        return problem.seqlen // chunk + problem.num_sequences
    return problem.batch_size * -(-problem.seqlen // chunk)
