"""Prefill that is faster by cuDNN's attention than by our kernels, on Hopper and newer GPUs.

cuDNN builds a plan for every new shape, which takes the host 45 to 85 ms on an H100. So only calls with much to compute
are sent to it automatically (docs/decisions/0054-prefill-by-cudnn-on-hopper.md).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.backends import cuda as switches

from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.sdpa import gpu_kernels
from fastattention.backends.sdpa.parts import are_aligned

# Floating-point operations from which a call is sent to cuDNN. Causal calls are prompts, most of which have a new
# length. Others are encoders and images, whose lengths repeat.
_LEAST_OPERATIONS_CAUSAL, _LEAST_OPERATIONS = 5e10, 1e10
_LEAST_QUERIES = 128  # our decode kernel serves calls with fewer


def why_faster(problem: Problem) -> str | None:
    """Why cuDNN's kernel serves a call faster than ours, or None."""
    expresses = gpu_kernels.differentiates if problem.needs_grad else gpu_kernels.computes
    if problem.seqlen_q < _LEAST_QUERIES or not expresses(problem):
        return None
    if gpu_kernels.kernel_of(problem) != "cudnn":
        return None
    operations = 4.0 * problem.batch_size * problem.nheads * problem.seqlen_q * problem.seqlen_k * problem.headdim
    least = 2.0 * _LEAST_OPERATIONS_CAUSAL if problem.is_causal else _LEAST_OPERATIONS  # half of the scores are hidden
    if operations < least:
        return None
    if problem.needs_grad:
        return "its backward is faster than our kernels on an H200"
    return "1.3 to 1.7 times as fast as our kernels on an H200"


def make_call(problem: Problem, otherwise: Callable[[Inputs], AttentionOutput]) -> Callable[[Inputs], AttentionOutput]:
    """Plans calls of a problem that cuDNN serves faster.

    otherwise: serves tensors that are not aligned, and calls while torch has cuDNN's attention switched off. It also
        serves calls with gradients while torch asks for deterministic algorithms.
    """

    def attend(inputs: Inputs) -> AttentionOutput:
        q, k, v = inputs.q, inputs.k, inputs.v
        # cuDNN's backward adds in any order.
        forbidden = problem.needs_grad and torch.are_deterministic_algorithms_enabled()
        if forbidden or not (are_aligned(q, k, v) and switches.cudnn_sdp_enabled()):  # type: ignore[no-untyped-call]
            return otherwise(inputs)
        result = gpu_kernels.attend_by_cudnn(problem, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return result._replace(out=result.out.transpose(1, 2).contiguous())

    return attend
