"""LINEAR_ATTENTION: the operator of linear attention."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fastattention.engine.offsets import recheck_offsets
from fastattention.engine.operator import Operator
from fastattention.linear.backend import LINEAR_BACKENDS, LinearBackend
from fastattention.linear.problem import LinearGradients, LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.validation import LinearOptions, as_backends_read, prepare


class LinearAttention(Operator[LinearInputs, LinearOptions, LinearProblem, LinearInputs, LinearOutput, LinearBackend]):
    """Every rule, in chunks and token by token."""

    name = "linear_attention"
    registry = LINEAR_BACKENDS
    fallback = "torch"
    given = LinearInputs
    options = LinearOptions
    inputs = LinearInputs
    output = LinearOutput
    tensors = LinearInputs._fields
    scalars = LinearOptions._fields
    results = ("out", "final_state")
    asked_by: ClassVar[Mapping[str, str]] = {"final_state": "returns_state"}
    gradients = LinearGradients
    offsets: ClassVar[tuple[str, ...]] = ("cu_seqlens",)

    def prepare(self, given: LinearInputs, options: LinearOptions) -> tuple[LinearProblem, LinearInputs]:
        return prepare(given, options)

    def as_read(self, problem: LinearProblem, inputs: LinearInputs, names: Sequence[str]) -> LinearInputs:
        return as_backends_read(inputs)

    def recheck(self, problem: LinearProblem) -> Callable[[LinearInputs, LinearOptions], LinearInputs | None] | None:
        return recheck_offsets(problem.seqlen) if problem.varlen else None

    def scalars_of(self, problem: LinearProblem) -> LinearOptions:
        return LinearOptions(problem.rule, problem.chunked, problem.scale, problem.l2norm, problem.returns_state)

    def result_shapes(
        self, given: LinearInputs, options: LinearOptions, differentiated: bool
    ) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        q, v = given.q, given.v
        sequences = v.shape[0] if given.cu_seqlens is None else given.cu_seqlens.shape[0] - 1
        state = (sequences, v.shape[2], q.shape[3], v.shape[3]) if options.returns_state else (0,)
        return {"out": (v.shape, v.dtype), "final_state": (state, torch.float32)}

    def joined_axes(self, arguments: Mapping[str, Any], mapped: Collection[str]) -> Mapping[str, int]:
        tokens = ("q", "k", "v", "g", "beta", "out")
        if "skip" in mapped:  # more heads
            return {**dict.fromkeys(tokens, 2), "skip": 0, "initial_state": 1, "final_state": 1}
        states = {"initial_state": 0, "final_state": 0}
        if arguments["cu_seqlens"] is not None:  # more sequences in a row
            return {**dict.fromkeys(tokens, 1), "cu_seqlens": 0, **states}
        return {**dict.fromkeys(tokens, 0), **states}

    def flops(self, arguments: Mapping[str, Any], backward: bool) -> int:
        """Counts the recurrence: every token updates a state, and is multiplied by it. A backward costs twice that.

        The delta rule also reads the state by the key. Chunks take more operations, which depend on their size.
        """
        q: Tensor = arguments["q"]
        v: Tensor = arguments["v"]
        per_token = 2 * q.shape[3] * v.shape[3] * (2 if arguments["beta"] is None else 3)
        return int(v.shape[0] * v.shape[1] * v.shape[2] * per_token * (2 if backward else 1))


LINEAR_ATTENTION = LinearAttention()
