"""Backends that compute nothing."""

from __future__ import annotations

from typing import ClassVar

import torch

from fastattention.attention.backend import AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Problem


class Willing(AttentionBackend):
    """Serves everything with zeros, and records its inputs."""

    name = "willing"
    served: ClassVar[list[tuple[Problem, Inputs]]] = []

    def why_unavailable(self) -> str | None:
        return None

    def why_not(self, problem: Problem) -> str | None:
        return None

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        Willing.served.append((problem, inputs))
        lse = torch.zeros(problem.lse_shape) if problem.return_lse else None
        return AttentionOutput(torch.zeros(problem.out_shape, dtype=problem.dtype), lse)

    def describe(self) -> str:
        return "zeros"


class Absent(Willing):
    """A backend for another machine."""

    name = "absent"

    def why_unavailable(self) -> str | None:
        return "needs a device called moon; there is none"

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        raise AssertionError("an unavailable backend was called")


class Picky(Willing):
    """A backend that serves only headdim 64."""

    name = "picky"

    def why_not(self, problem: Problem) -> str | None:
        return None if problem.headdim == 64 else f"headdim={problem.headdim} is not supported by picky; use 64"
