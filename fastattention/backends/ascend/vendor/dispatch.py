"""Chooses the operators that serve a call and its gradients."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, OutputGradients, Problem
from fastattention.backends.ascend.vendor import cache, limits, prefill, selected
from fastattention.backends.ascend.vendor.gradients import ForwardResults, backward_dense, backward_varlen
from fastattention.backends.ascend.vendor.masks import rows_without_keys
from fastattention.backends.common.results import keyless


def forward(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """Attention of a problem that `why_not` accepted, on the device of its tensors.

    inputs: q after rotary embedding, caches with the new tokens appended; cache_seqlens does not count them.
    Reads lengths of varlen calls and of caches on the host, where the operators take them: this waits for the
    device. Selected keys are no such case. Raises UnsupportedError for a paged cache or varlen keys larger than the
    operators can count, and for selected keys whose values are not in them.
    """
    if problem.keeps_lse and not problem.return_lse:
        problem = dataclasses.replace(problem, return_lse=True)
    if problem.layout is Layout.VARLEN:
        return prefill.forward_varlen(problem, inputs)
    if limits.is_selected(problem):
        return selected.forward(problem, inputs)
    if problem.layout is Layout.KVCACHE:
        return cache.forward(problem, inputs, cache.cache_lengths(problem, inputs))
    return _forward_dense(problem, inputs)


def backward(problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients) -> dict[str, Tensor]:
    """The gradient of every tensor in `problem.grads`, of a problem with gradients that `why_not` accepted.

    result: what `forward` gave. Reads the lengths of varlen calls on the host, as `forward` does.
    """
    assert result.lse is not None
    assert grads.out is not None
    assert grads.lse is None, "why_not refuses return_lse with gradients"
    results = ForwardResults(result.out, result.lse, grads.out)
    if problem.layout is Layout.VARLEN:
        return backward_varlen(problem, inputs, results)
    return backward_dense(problem, inputs, results)


def why_rather_not(problem: Problem, inputs: Inputs) -> str | None:
    """Why a kernel that reads tensors where they lie should serve a call, though `why_not` accepts its problem.

    The tensors are larger than the operators can count, which `forward` refuses, or would be copied in every call.
    """
    if problem.layout is Layout.VARLEN and inputs.k.shape[0] > limits.MAX_TOKENS:
        return f"k has {inputs.k.shape[0]} tokens; the operators take {limits.MAX_TOKENS} at most"
    if inputs.cache_batch_idx is not None or inputs.cache_leftpad is not None:
        return "cache_batch_idx and cache_leftpad are unknown to the operators: the keys in use would be copied"
    if inputs.block_table is None:
        return None
    if inputs.k.numel() > cache.MAX_PAGED_ELEMENTS:
        return f"k_cache has {inputs.k.numel()} elements; the operators take {cache.MAX_PAGED_ELEMENTS} at most"
    if not (cache.lies_heads_first(inputs) or (inputs.k.is_contiguous() and inputs.v.is_contiguous())):
        return "pages are contiguous neither tokens first nor heads first: all of them would be copied"
    scales = [scale for scale in (inputs.k_scale, inputs.v_scale) if scale is not None]
    if not all(scale.transpose(1, 2).is_contiguous() for scale in scales):
        return "scales of pages are not contiguous heads first: all of them would be copied"
    return None


def _forward_dense(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """Dense attention. Rows without keys are the first of every sequence and are not given to an operator."""
    hidden = rows_without_keys(problem.seqlen_q, problem.seqlen_k, problem.window_right)
    if hidden == 0 and problem.total_q:
        return _attend_dense(problem, inputs)
    output = keyless(problem, inputs)
    seqlen_q = problem.seqlen_q - hidden
    if problem.batch_size and seqlen_q:
        rest = prefill.last_queries(problem, seqlen_q)
        part = _attend_dense(rest, inputs._replace(q=inputs.q[:, hidden:]))
        output.out[:, hidden:] = part.out
        if output.lse is not None and part.lse is not None:
            output.lse[..., hidden:] = part.lse
    return output


def _attend_dense(problem: Problem, inputs: Inputs) -> AttentionOutput:
    """Dense attention, by the operator that is documented for inference where it takes the call."""
    if limits.why_not_inference(problem) is None:
        return cache.forward(problem, inputs, [problem.seqlen_k] * problem.batch_size)
    return prefill.forward_dense(problem, inputs)
