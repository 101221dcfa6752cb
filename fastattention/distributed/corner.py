"""Causal attention to more keys than queries, where kernels know only squares.

The last seqlen_q keys and the queries make a square, whose lower triangle is seen; all keys before them are seen by all
queries. lse merges the two exactly.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fastattention.backends.registry import select_backend
from fastattention.dispatch import run
from fastattention.merge import merge_attn_states
from fastattention.problem import Inputs, Layout, Problem


def attend(problem: Problem, inputs: Inputs, backend: str) -> Tensor:
    """The result of a validated call, at once or in two, whichever its backend prefers."""
    if not (_has_corner(problem) and select_backend(problem, backend).prefers_corner(problem)):
        return run(problem, inputs, backend).out
    before = problem.seqlen_k - problem.seqlen_q
    rectangle = replace(problem, seqlen_k=before, window_right=-1, return_lse=True)
    corner = replace(problem, seqlen_k=problem.seqlen_q, return_lse=True)
    first = run(rectangle, inputs._replace(k=inputs.k[:, :before], v=inputs.v[:, :before]), backend)
    last = run(corner, inputs._replace(k=inputs.k[:, before:], v=inputs.v[:, before:]), backend)
    assert first.lse is not None
    assert last.lse is not None
    return merge_attn_states((first.out, last.out), (first.lse, last.lse))[0]


def _has_corner(problem: Problem) -> bool:
    return (
        problem.layout is Layout.DENSE
        and problem.is_causal
        and not (problem.has_bias or problem.has_alibi or problem.has_sinks)  # each part would count a sink
        and 1 < problem.seqlen_q < problem.seqlen_k  # a single query sees every key
    )
