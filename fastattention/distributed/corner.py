"""Causal attention to more keys than queries, where kernels know only squares.

The last seqlen_q keys and the queries make a square, whose lower triangle is seen; all keys before them are seen by all
queries. lse merges the two exactly.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from fastattention.backends.registry import select_backend
from fastattention.dispatch import run
from fastattention.merge import merge_attn_states
from fastattention.problem import Inputs, Layout, Problem


class Division(NamedTuple):
    """A call in two."""

    rectangle: Problem  # all keys before the last seqlen_q
    corner: Problem  # these

    @property
    def num_keys(self) -> int:
        """Of the rectangle."""
        return self.rectangle.seqlen_k


def attend(problem: Problem, inputs: Inputs, backend: str) -> Tensor:
    """The result of a validated call, at once or in two, whichever its backend prefers.

    Callers have passed `stop_if_explaining`: nothing is asked twice before a short call.
    """
    server, division = select_backend(problem, backend), divide(problem)
    if division is None or not server.prefers_corner(division.corner):
        return server.forward(problem, inputs).out
    k, v, at = inputs.k, inputs.v, division.num_keys
    first = run(division.rectangle, inputs._replace(k=k[:, :at], v=v[:, :at]), backend)
    last = run(division.corner, inputs._replace(k=k[:, at:], v=v[:, at:]), backend)
    assert first.lse is not None
    assert last.lse is not None
    return merge_attn_states((first.out, last.out), (first.lse, last.lse))[0]


@functools.lru_cache(maxsize=4096)
def divide(problem: Problem) -> Division | None:
    """None where there is no such corner, or scores depend on where keys are."""
    divisible = (
        problem.layout is Layout.DENSE
        and problem.is_causal
        and not (problem.has_bias or problem.has_alibi or problem.has_sinks)  # each part would count a sink
        and 1 < problem.seqlen_q < problem.seqlen_k  # a single query sees every key
    )
    if not divisible:
        return None
    before = problem.seqlen_k - problem.seqlen_q
    return Division(
        replace(problem, seqlen_k=before, window_right=-1, return_lse=True),
        replace(problem, seqlen_k=problem.seqlen_q, return_lse=True),
    )
