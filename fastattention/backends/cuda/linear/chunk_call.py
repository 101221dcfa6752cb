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
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.backends.common.layout import first_strides, named_strides, pointers, token_strides
from fastattention.backends.cuda.common.dtype_codes import DTYPE_CODES
from fastattention.backends.cuda.common.memory import aligned_as, check_float16_range
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
        prepare, states, outputs = kernels = choose_chunk_kernels(problem, arch, limits)
        self._num_slots = _num_slots(problem, states.chunk)
        self._columns_v = -(-problem.headdim_v // 8) * 8
        heads, square = problem.nheads * self._num_slots, states.chunk**2
        tokens = states.chunk * states.headdim * problem.gate_per_key
        state, updates = self._columns_v * states.headdim, self._columns_v * states.chunk * problem.delta_rule
        scratch = {  # bytes
            "scores": 2 * square, "inverse": 2 * square * problem.delta_rule, "factors": 4 * prepare.num_factors,
            "q_scaled": 2 * tokens, "k_scaled": 2 * tokens * (1 + problem.delta_rule),
            "states": 2 * state, "updates": 2 * updates,
        }  # fmt: skip
        *self._offsets, self._scratch_bytes = itertools.accumulate(
            (heads * size for size in scratch.values()), initial=0
        )
        self._template_as_given: bytes | None = None  # for calls whose tensors kernels read without a copy
        self._make = ChunkParams.maker(*LinearInputs._fields, "out", "final_state", *scratch)
        state_parts = -(-problem.headdim_v // states.value_columns) * states.num_key_parts
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
        given = inputs
        q, k, v = (aligned_as(tensor, self._dtype) for tensor in inputs[:3])
        if problem.gate_per_key:  # prepare_keys.cuh reads four gates at once
            inputs = inputs._replace(g=aligned_as(inputs.g, inputs.g.dtype))
        as_given = q is given.q and k is given.k and v is given.v and inputs.g is given.g
        template = self._template_as_given if as_given else None
        if template is None:
            template = self._template(q, k, v, inputs)
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
            out = out[..., : problem.headdim_v].to(problem.dtype, memory_format=torch.contiguous_format)
        return LinearOutput(out, final_state)

    def _template(self, q: Tensor, k: Tensor, v: Tensor, inputs: LinearInputs) -> bytes:
        problem = self._problem
        return ChunkParams.template(
            **named_strides("q", token_strides(q)),
            **named_strides("k", token_strides(k)),
            **named_strides("v", token_strides(v)),
            **named_strides("g", first_strides(inputs.g)),
            **named_strides("beta", first_strides(inputs.beta)),
            **named_strides("state", first_strides(inputs.initial_state), "sequence head key"),
            num_sequences=problem.num_sequences,
            seqlen=problem.seqlen,
            num_slots=self._num_slots,
            nheads=problem.nheads,
            group_size=problem.group_size,
            headdim_k=problem.headdim_k,
            headdim_v=problem.headdim_v,
            columns_k=q.shape[-1],
            columns_v=self._columns_v,
            gate_format=DTYPE_CODES[problem.gate_dtype],
            beta_format=DTYPE_CODES[problem.beta_dtype or torch.float32],
            normalizes=problem.l2norm,
            scale=problem.scale,
        )


def _num_slots(problem: LinearProblem, chunk: int) -> int:
    """Chunks that scratch of a head has room for: the most that a varlen call can have (kernels/chunk.cuh)."""
    if problem.varlen:
        return problem.seqlen // chunk + problem.num_sequences
    return problem.batch_size * -(-problem.seqlen // chunk)
