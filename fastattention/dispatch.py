"""Runs a validated call on the backend that serves it, or explains the choice."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattention.backends.registry import Verdict, check_name, select_backend, verdicts
from fastattention.errors import ArgumentError
from fastattention.problem import AttentionOutput, Inputs, Problem


class Explanation(NamedTuple):
    """Which backend serves a call, and every backend's reason. `print` shows a table."""

    problem: Problem
    verdicts: tuple[Verdict, ...]

    @property
    def backend(self) -> str | None:
        """Name of the backend that `backend="auto"` takes; None when there is none."""
        return next((verdict.backend for verdict in self.verdicts if verdict.reason is None), None)

    def __str__(self) -> str:
        chosen = self.backend
        lines = []
        for name, reason, how in self.verdicts:
            served = "serves this call" if name == chosen else "could serve this call"
            state = reason or (f"{served} by {how}" if how else served)
            lines.append(f"{'->' if name == chosen else '  '} {name}: {state}")
        return "\n".join(lines)


class _Explained(BaseException):
    """Leaves a call that is only explained, at the point where its backend would be chosen."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


_explaining: ContextVar[bool] = ContextVar("explaining", default=False)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_active_dispatch_modes = torch._C._len_torch_dispatch_stack


def explain_call(call: Callable[[], object]) -> Explanation:
    """Every backend's verdict on what `call` asks for. The call runs up to the choice of its backend, no further."""
    token = _explaining.set(True)
    try:
        call()
    except _Explained as explained:
        return explained.explanation
    finally:
        _explaining.reset(token)
    raise ArgumentError(
        "explain reached no choice of a backend: function must be one of fastattention's, on tensors that hold data "
        "(not fake ones, not under torch.compile)"
    )


def run(problem: Problem, inputs: Inputs, backend: str) -> AttentionOutput:
    """Serves a validated call with the backend of that name, or with the first that can for "auto"."""
    if _explaining.get():
        _stop(problem, backend)
    if not isinstance(backend, str):  # the look-up wants what can be hashed
        check_name(backend)  # type: ignore[unreachable]
    return select_backend(problem, backend).forward(problem, inputs)


def is_observed() -> bool:
    """True where more is wanted of a call than its result.

    That is so under torch.compile, any active dispatch mode and `explain_call`, and while autograd records, backward or
    forward.
    """
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _active_dispatch_modes() > 0
        or _explaining.get()
        or forward_ad._current_level >= 0
    )


def stop_if_explaining(problem: Problem, backend: str) -> None:
    """Ends the call with every backend's verdict where `explain_call` has asked for no more than that."""
    if _explaining.get():
        _stop(problem, backend)


def _stop(problem: Problem, backend: str) -> NoReturn:
    check_name(backend)  # an unknown one is an error here as it is in the call
    raise _Explained(Explanation(problem, tuple(verdicts(problem))))


def runs_eagerly(q: Tensor) -> bool:
    """True when kernels may read q's memory now; False when the call must stay an operator.

    That is so under torch.compile and any active dispatch mode, and for tensor subclasses (fake tensors among them) and
    tensors on the meta device.
    """
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN_TYPES
        and not q.is_meta
        and _active_dispatch_modes() == 0
    )
