"""Causal attention to more keys than queries by cuDNN's kernel, which aligns masks to the top left: in two calls.

The last seqlen_q keys and the queries make a square, whose lower triangle is visible. All keys before them are visible
to all queries. The two results are merged exactly by their lse.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch

from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.backends.sdpa import gpu_kernels

_LEAST_QUERIES = 512  # with fewer, one call of FlashAttention is faster than two launches and a merge


class Division(NamedTuple):
    """A call in two."""

    rectangle: Problem  # all keys before the last seqlen_q
    square: Problem  # the last seqlen_q keys


def divide(problem: Problem) -> Division | None:
    """The two calls; None where a problem cannot be divided, or one call is as fast."""
    division = _divide(problem)
    if division is None or not gpu_kernels.can_serve(division.square):
        return None
    return division if gpu_kernels.kernel_of(division.square) == "cudnn" else None


@functools.lru_cache(maxsize=4096)
def _divide(problem: Problem) -> Division | None:
    """The two calls; None where scores depend on positions of keys."""
    divisible = (
        problem.layout is Layout.DENSE
        and problem.is_causal
        and not problem.score_arguments  # each part would count a sink
        and _LEAST_QUERIES <= problem.seqlen_q < problem.seqlen_k
    )
    if not divisible:
        return None
    before = problem.seqlen_k - problem.seqlen_q
    return Division(
        replace(problem, seqlen_k=before, window_right=-1, return_lse=True),
        replace(problem, seqlen_k=problem.seqlen_q, return_lse=True),
    )


def inputs_of(division: Division, inputs: Inputs) -> tuple[Inputs, Inputs]:
    """The tensors of either call."""
    k, v, at = inputs.k, inputs.v, division.rectangle.seqlen_k
    return inputs._replace(k=k[:, :at], v=v[:, :at]), inputs._replace(k=k[:, at:], v=v[:, at:])


def merge(first: AttentionOutput, last: AttentionOutput, return_lse: bool) -> AttentionOutput:
    """The results of both as one: in float32, and rounded once.

    Every row sees keys in either, so that nothing `merge_parts` does for empty parts is needed, nor its copies.
    """
    assert first.lse is not None
    assert last.lse is not None
    weight = torch.sigmoid(first.lse - last.lse).transpose(1, 2).unsqueeze(-1)
    out = torch.lerp(last.out.float(), first.out.float(), weight).to(first.out.dtype)
    return AttentionOutput(out, torch.logaddexp(first.lse, last.lse) if return_lse else None)
