"""Backend: what every engine of attention implements. docs/internals/adding-a-backend.md walks through one."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import ClassVar

from torch import Tensor

from fastattention.attention.problem import AttentionOutput, Inputs, MergeProblem, OutputGradients, Problem
from fastattention.backends.common.merge import merge_parts
from fastattention.backends.common.traffic import Extent, Traffic, is_modelled, traffic_of

INT8_PRODUCTS = "int8 products of queries and keys, approximate"  # what `Backend.how` says of qk_dtype


class Backend(abc.ABC):
    """One engine of attention.

    A backend says why it cannot run; it never guesses and never computes something else than it was asked.
    """

    name: ClassVar[str]
    # Whether `backward` gives the gradients of a problem with `grads`. Otherwise `why_not` refuses such a problem, or
    # `forward` is made of operations of torch, which autograd follows.
    has_backward: ClassVar[bool] = False
    # Whether it reads lengths, offsets and block tables in host memory, wherever the tensors are. Their numbers are
    # checked then, and no CUDA graph can capture such a call.
    reads_numbers: ClassVar[bool] = False

    @abc.abstractmethod
    def why_unavailable(self) -> str | None:
        """Why this machine cannot run the backend at all, or None. Must not raise."""

    @abc.abstractmethod
    def why_not(self, problem: Problem) -> str | None:
        """Why this backend cannot serve `problem` on a machine where it is available, or None.

        The reason says what was given, what is allowed and what to do. The answer depends on `problem` alone.
        """

    @abc.abstractmethod
    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        """Attention for a problem that `why_not` accepted.

        For Layout.KVCACHE with `inputs.k_new`, first appends to the caches in place, rotating k_new and q.
        """

    def plan(self, problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
        """`forward` for this problem, for any inputs that differ from these only in addresses and numbers.

        It keeps none of the tensors, and several threads may call it at a time.
        """
        return functools.partial(self.forward, problem)

    def backward(
        self, problem: Problem, inputs: Inputs, result: AttentionOutput, grads: OutputGradients
    ) -> dict[str, Tensor]:
        """The gradient of every tensor in `problem.grads`, by its name: contiguous, of the tensor's shape and dtype.

        result: what `forward` gave, lse included. Neither it nor any of `inputs` is written.
        """
        raise NotImplementedError(f"{self.name} has no backward")

    def how(self, problem: Problem) -> str:
        """By which of several means this backend serves a problem that `why_not` accepted; "" when it has but one."""
        return ""

    def why_faster(self, problem: Problem) -> str | None:
        """Why this backend is faster than those before it in the registry, for a problem that `why_not` accepted.

        None where it is not, or is not known to be. The answer depends on `problem`, its device and torch alone.
        """
        return None

    def traffic(self, problem: Problem, extent: Extent) -> Traffic | None:
        """Main-memory traffic of a problem that `why_not` accepted; its bounds alone where kernels are not modelled.

        None for a problem that is not modelled at all (`is_modelled`).
        """
        return traffic_of(problem, extent, self.name, None, None) if is_modelled(problem) else None

    def why_not_merge(self, problem: MergeProblem) -> str | None:
        """Why this backend cannot merge parts, as `why_not`. The operations of torch merge any."""
        return None

    def merge(self, problem: MergeProblem, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(out, lse) of parts that `why_not_merge` accepted, as `fastattention.merge_attn_states` defines them.

        Any strides, but the last axis of outs is contiguous. lses: float32, (batch_size, nheads, seqlen_q) or varlen.
        """
        return merge_parts(outs, lses)

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for `fastattention info`: what it runs on here, e.g. instruction set and threads."""
