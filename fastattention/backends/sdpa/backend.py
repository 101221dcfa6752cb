"""The sdpa backend: torch's own attention, for any device that no other backend serves, and for gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattention.attention.backend import AttentionBackend
from fastattention.attention.problem import PAIR_MASK, AttentionOutput, Inputs, Layout, Problem
from fastattention.backends.common.arguments import why_not_arguments
from fastattention.backends.common.gradients import NO_BACKWARD
from fastattention.backends.common.kv_append import append_tokens
from fastattention.backends.common.panel_cache import REFUSAL
from fastattention.backends.sdpa import causal_split, cudnn_prefill, fused, gpu_kernels, math
from fastattention.backends.sdpa.masks import CHUNK_ELEMENTS
from fastattention.backends.sdpa.parts import Part, aligned, join, split

# Not qk_dtype: torch's kernels multiply queries and keys in their own dtype.
_SERVED = frozenset({"alibi_slopes", "attn_bias", "sinks", "block_mask", PAIR_MASK, "dropout_p", "softcap"})


class SdpaBackend(AttentionBackend):
    """scaled_dot_product_attention where it can express the call, plain torch in float32 where it cannot."""

    name = "sdpa"
    reads_numbers = True

    def why_unavailable(self) -> str | None:
        """Never: torch is always there."""
        return None

    def why_not(self, problem: Problem) -> str | None:
        """Refuses gradients through an append, caches in panels, and products in int8."""
        if problem.panel_size:
            return REFUSAL
        if (reason := why_not_arguments(problem, self.name, _SERVED)) is not None:
            return reason
        if problem.layout is Layout.KVCACHE and problem.needs_grad:
            return NO_BACKWARD
        return None

    def how(self, problem: Problem) -> str:
        """Says "cuDNN's operator" where it is faster by it. Otherwise torch chooses, and differentiates."""
        if cudnn_prefill.why_faster(problem):
            return "cuDNN"
        return "operations that torch differentiates" if problem.needs_grad else ""

    def why_faster(self, problem: Problem) -> str | None:
        """The reason where cuDNN, or FlashAttention-2's backward, is faster."""
        return cudnn_prefill.why_faster(problem)

    def make_call(self, problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
        """Plans a call of cuDNN's operator where it is faster."""
        generally = functools.partial(self._forward, problem)
        return generally if cudnn_prefill.why_faster(problem) is None else cudnn_prefill.make_call(problem, generally)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Attention, prepared for this call alone."""
        return self.make_call(problem, inputs)(inputs)

    def _forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Appends, splits the call into sequences of one length, attends to each and joins the results."""
        # torch's kernels have no derivatives in forward mode
        by_kernels = not (problem.needs_grad and forward_ad._current_level >= 0)
        whole = fused.attend_whole(problem, inputs) if by_kernels else None
        if whole is not None:
            return AttentionOutput(whole, None)
        division = causal_split.divide(problem) if by_kernels else None
        if division is not None:
            first, last = causal_split.inputs_of(division, inputs)
            return causal_split.merge(
                self.forward(division.rectangle, first), self.forward(division.square, last), problem.return_lse
            )
        if by_kernels and gpu_kernels.can_serve(problem):
            q, k, v = (aligned(x.transpose(1, 2)) for x in (inputs.q, inputs.k, inputs.v))
            return join(problem, inputs, [gpu_kernels.attend(problem, q, k, v)])
        q = inputs.q if inputs.k_new is None else append_tokens(problem, inputs)
        fits = problem.batch_size * problem.nheads * problem.seqlen_q * problem.seqlen_k <= CHUNK_ELEMENTS
        by_kernels = by_kernels and fused.can_express(problem)
        unmasked = by_kernels and not problem.score_arguments
        seed = inputs.dropout_seed if problem.dropout_p else None
        parts = split(problem, inputs, q, whole_batch=fits or unmasked)
        return join(problem, inputs, [_attend(problem, part, seed, by_kernels) for part in parts])

    def describe(self) -> str:
        """Version of torch and which of its kernels are switched on."""
        kernels = [name for name in ("flash", "mem_efficient", "cudnn", "math") if _is_enabled(name)]
        return f"torch {torch.__version__} scaled_dot_product_attention; kernels enabled: {', '.join(kernels)}"


def _is_enabled(kernel: str) -> bool:
    """Whether torch may use a kernel of its own. A kernel that this version of torch lacks is not enabled."""
    question = getattr(torch.backends.cuda, f"{kernel}_sdp_enabled", None)
    return question is not None and bool(question())


def _attend(problem: Problem, part: Part, seed: Tensor | None, by_kernels: bool) -> AttentionOutput:
    if by_kernels and part.q.numel() and part.k.numel():
        return AttentionOutput(fused.attend(problem, part), None)
    return math.attend(problem, part, seed)
