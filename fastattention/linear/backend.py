"""LinearBackend: what every engine of linear attention implements."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import ClassVar

from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem

Serve = Callable[[LinearInputs], LinearOutput]


class LinearBackend(abc.ABC):
    """One engine of linear attention. It says why it cannot run; it never computes something else than it was asked."""

    name: ClassVar[str]

    @abc.abstractmethod
    def why_unavailable(self) -> str | None:
        """Why this machine cannot run the backend at all, or None. Must not raise."""

    @abc.abstractmethod
    def why_not(self, problem: LinearProblem) -> str | None:
        """Why this backend cannot serve `problem` on a machine where it is available, or None."""

    @abc.abstractmethod
    def plan(self, problem: LinearProblem, inputs: LinearInputs) -> Serve:
        """How calls of `problem` are served, for tensors that differ from `inputs` only in addresses and numbers.

        It keeps none of the tensors, and several threads may call it at a time. No call writes its inputs.
        """

    def how(self, problem: LinearProblem) -> str:
        """By which means this backend serves a problem that `why_not` accepted."""
        return "chunks" if problem.chunked else "token by token"
