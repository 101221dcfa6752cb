"""Runs a validated call on the backend that serves it, or explains the choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fastattention.backends.registry import Verdict, check_name, select_backend, verdicts
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.validation.common import is_differentiating
from fastattention.validation.kinds import check_kinds, check_readable


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


# What fast_attn_with_kvcache calls the fields of Inputs.
_KVCACHE_NAMES = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v"}
_explaining: ContextVar[bool] = ContextVar("explaining", default=False)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_is_profiling = torch._C._autograd._profiler_enabled
_active_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform_level = torch._C._functorch.maybe_current_level  # of torch.func; None outside


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
    """Serves a validated call with the backend of that name, or with the first that can for "auto".

    Profilers see a range with the backend's name.
    """
    if _explaining.get():
        _stop(problem, backend)
    if not isinstance(backend, str):  # the look-up wants what can be hashed
        check_name(backend)  # type: ignore[unreachable]
    chosen = select_backend(problem, backend)
    try:
        if _is_profiling():
            with torch.profiler.record_function(f"fastattention::{chosen.name}"):
                return chosen.forward(problem, inputs)
        return chosen.forward(problem, inputs)
    except RuntimeError:
        names = _KVCACHE_NAMES if problem.layout is Layout.KVCACHE else {}
        check_readable({names.get(name, name): tensor for name, tensor in inputs._asdict().items()})
        raise


def is_observed() -> bool:
    """True where more is wanted of a call than its result.

    That is so while it is traced or only explained, and while autograd records, backward or forward.
    """
    return (
        torch.is_grad_enabled()
        or is_traced()
        or _transform_level() is not None
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


def runs_eagerly(*tensors: object) -> bool:
    """True when kernels may read the memory of all tensors now; False when the call must stay an operator.

    That is so while a call is traced or transformed by torch.func.vmap, and for tensor subclasses (fake tensors,
    DTensors and results of collectives among them), views that negate what lies in memory, and where the first is on
    the meta device. Values that are no tensors are left to validation. Within torch.func.grad and jvp a call runs: in
    operations of torch, which those transforms follow, because it needs a gradient.
    """
    if is_traced():
        return False
    if _transform_level() is not None:
        return is_differentiating()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) in _PLAIN_TYPES:
            if tensor.is_neg():  # type: ignore[attr-defined]
                return False
        elif isinstance(tensor, Tensor):
            return False
    return not (isinstance(tensors[0], Tensor) and tensors[0].is_meta)


def require_eager(tensors: Mapping[str, object], remedy: str = "") -> None:
    """Raises, naming a tensor or what else is in the way, unless `runs_eagerly`: for calls that are no operators.

    remedy: what to do instead, from its semicolon on
    """
    if runs_eagerly(*tensors.values()):
        with contextlib.suppress(RuntimeError):  # of tensors that are not strided, which have no address
            if all(x.data_ptr() and not x.is_nested for x in tensors.values() if isinstance(x, Tensor)):
                return
        check_readable(tensors)
        return
    check_kinds(tensors)
    if not (is_traced() or _transform_level() is not None):
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and (type(tensor) not in _PLAIN_TYPES or tensor.is_meta or tensor.is_neg()):
                negated = ", a view that negates what lies in memory" if tensor.is_neg() else ""
                given = f"{type(tensor).__name__} on {tensor.device}{negated}"
                raise ArgumentError(f"{name} is {given}; it must be a plain tensor that holds data{remedy}")
    raise UnsupportedError(
        "the call is being traced, by torch.compile, torch.jit, torch.func or a dispatch mode, which it does not serve"
        + remedy
    )


def is_traced() -> bool:
    """True under torch.compile, torch.jit.trace and any active dispatch mode."""
    return torch.compiler.is_compiling() or _active_dispatch_modes() > 0 or torch._C._get_tracing_state() is not None
