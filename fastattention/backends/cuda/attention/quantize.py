"""Products of queries and keys in int8: before attention both become bytes, with scales.

Attention reads bytes in pairs, as half as many 16-bit elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.common.layout import named_strides, pointers, token_strides
from fastattention.backends.cuda.attention.call import AttentionCall, Launcher
from fastattention.backends.cuda.attention.config import WIDEST_OF_A_WARP, QuantizeConfig, lanes_for, stored_columns
from fastattention.backends.cuda.attention.heuristics import multiplies_int8, score_rules
from fastattention.backends.cuda.attention.params import QuantizeParams
from fastattention.backends.cuda.common.memory import prepared
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.quantized import KEYS_OF_SCALE

_make_params = QuantizeParams.maker(
    "q", "k", "cu_seqlens_q", "cu_seqlens_k", "sums", "q_stored", "k_stored", "q_scale", "q_shift", "k_scale"
)


def why_not_int8(problem: Problem, arch: int) -> str | None:
    """Why the kernels of a code path do not multiply the queries and keys of a call in int8; None where they do."""
    if problem.qk_dtype is None:
        return None
    if not multiplies_int8(arch):
        return (
            "qk_dtype='int8' needs the matrix instructions of Turing (7.5) or newer; a V100 multiplies bytes at half "
            "the rate of float16 (62 TOPS, 125 TFLOPS), a P100 not at all; leave it out"
        )
    if problem.is_paged:
        return "qk_dtype with pages is not served; leave it out, or give keys and values without a block_table"
    if not multiplies_int8(arch, problem.headdim):
        return f"qk_dtype with headdim={problem.headdim} is not served; up to {WIDEST_OF_A_WARP} it is; leave it out"
    return None


class Int8Call:
    """Attention of a problem with qk_dtype, for tensors with the strides of one signature.

    dtype: that in which attention reads and writes; launcher: gives a function that enqueues a kernel; call_for: makes
        the call for tensors whose queries and keys are bytes
    """

    def __init__(
        self,
        problem: Problem,
        dtype: torch.dtype,
        launcher: Callable[[KernelLaunch], Launcher],
        call_for: Callable[[Problem, Inputs], AttentionCall],
    ) -> None:
        self._problem, self._dtype, self._call_for = problem, dtype, call_for
        self._keeps_shift = problem.return_lse or "sinks" in problem.score_tensors or any(score_rules(problem).values())
        self._calls: dict[tuple[int, ...], AttentionCall] = {}  # by strides of v: one that is not aligned is copied
        self._num_chunks = -(-problem.seqlen_k // QuantizeConfig.chunk_tokens)
        self._tiles = tuple(-(-tokens // KEYS_OF_SCALE) for tokens in (problem.seqlen_q, problem.seqlen_k))
        q_tiles, k_tiles = self._tiles
        config = QuantizeConfig(dtype, lanes_for(stored_columns(problem.headdim)))
        chunks = problem.batch_size * problem.nheads_k * self._num_chunks
        tiles = problem.batch_size * (problem.nheads * q_tiles + problem.nheads_k * k_tiles)
        self._launchers = [
            launcher(KernelLaunch(config, entry, num_ctas))
            for entry, num_ctas in enumerate((chunks, tiles))
            if num_ctas
        ]

    def __call__(self, inputs: Inputs) -> AttentionOutput:
        """Two kernels quantize queries and keys to bytes, then attention runs."""
        problem, dtype = self._problem, self._dtype
        quantized = self._quantized(prepared(inputs, dtype))
        strides = quantized.v.stride()
        call = self._calls.get(strides)
        if call is None:
            as_prepared = replace(problem, dtype=dtype, headdim_v=quantized.v.shape[-1])
            call = self._calls[strides] = self._call_for(as_prepared, quantized)
        out, lse, _ = call(quantized)
        out = out[..., : problem.headdim_v].to(problem.dtype).contiguous()
        return AttentionOutput(out, lse)

    def _quantized(self, inputs: Inputs) -> Inputs:
        q, k, problem = inputs.q, inputs.k, self._problem
        columns = stored_columns(q.shape[-1])
        q_stored, k_stored = (x.new_empty((*x.shape[:-1], columns), dtype=torch.int8) for x in (q, k))
        *batch, tokens, nheads, _ = q.shape
        q_scale = q.new_empty((*batch, nheads, tokens), dtype=torch.float32)
        q_shift = torch.empty_like(q_scale) if self._keeps_shift else None
        k_scale = q_scale.new_empty(problem.batch_size, problem.nheads_k, self._tiles[1])
        sums = q_scale.new_empty(problem.batch_size, self._num_chunks, problem.nheads_k, columns)
        template = QuantizeParams.template(
            **named_strides("q", token_strides(q)),
            **named_strides("k", token_strides(k)),
            batch_size=problem.batch_size,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            total_q=tokens,
            nheads=problem.nheads,
            nheads_k=problem.nheads_k,
            headdim=q.shape[-1],
            columns=columns,
            num_chunks=self._num_chunks,
            q_tiles=self._tiles[0],
            k_tiles=self._tiles[1],
        )
        tensors = (q, k, inputs.cu_seqlens_q, inputs.cu_seqlens_k, sums, q_stored, k_stored, q_scale, q_shift, k_scale)
        params = _make_params(template, *pointers(*tensors))
        for launch in self._launchers:
            launch(params)
        return inputs._replace(
            q=q_stored.view(self._dtype), k=k_stored.view(self._dtype), q_scale=q_scale, q_shift=q_shift,
            k_scale=k_scale.transpose(1, 2),
        )  # fmt: skip
