"""Backend: the interface that every engine of an operator implements."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor

P = TypeVar("P")  # the problem: everything about a call except its tensors, frozen and hashable
I = TypeVar("I", bound=tuple[Any, ...])  # noqa: E741  its tensors, a NamedTuple
O = TypeVar("O", bound=tuple[Any, ...])  # noqa: E741  its results, a NamedTuple


class Backend(abc.ABC, Generic[P, I, O]):
    """One engine of an operator.

    A backend says why it cannot run; it never guesses, and never computes anything but what it was asked.
    """

    name: ClassVar[str]
    # Whether `backward` computes the gradients of a problem with `grads`. Otherwise `why_not` refuses such a problem,
    # or its calls consist of operations of torch, which autograd follows.
    has_backward: ClassVar[bool] = False
    # Whether it reads lengths, offsets and block tables in host memory, for tensors on any device. Their values are
    # then checked, and CUDA graphs cannot capture such a call.
    reads_numbers: ClassVar[bool] = False

    @abc.abstractmethod
    def why_unavailable(self) -> str | None:
        """Why this machine cannot run the backend at all, or None. Must not raise."""

    @abc.abstractmethod
    def why_not(self, problem: P) -> str | None:
        """Why this backend cannot serve `problem` on a machine where it is available, or None.

        The reason says what was given, what is allowed and what to do. The answer depends on `problem` alone.
        """

    @abc.abstractmethod
    def make_call(self, problem: P, inputs: I) -> Callable[[I], O]:
        """A function that serves an accepted problem, for inputs that differ from these only in addresses and values.

        The function keeps none of the tensors, and several threads may call it at a time.
        """

    def backward(self, problem: P, inputs: I, result: O, grads: Any) -> Mapping[str, Tensor]:
        """The gradient of every tensor in `problem.grads`, by its name: contiguous, of the tensor's shape and dtype.

        result: the output of the call. Neither it nor any of `inputs` is written.
        """
        raise NotImplementedError(f"{self.name} has no backward")

    def how(self, problem: P) -> str:
        """The means by which this backend serves a problem that `why_not` accepted; "" when it has only one."""
        return ""

    def why_faster(self, problem: P) -> str | None:
        """Why this backend is faster than those before it in the registry, for a problem that `why_not` accepted.

        None where it is not, or is not known to be. The answer depends on `problem`, its device and torch alone.
        """
        return None
