"""Finds or makes the plan of a call, or explains the choice of its backend.

A plan is kept for every signature: all that validation and kernels read of a call but addresses and the numbers in
index tensors. A call whose signature is known is one look-up, checks of those numbers, and a launch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from fastattention.attention.autograd import differentiable
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, Problem
from fastattention.attention.validation import KvCacheArguments, PanelCache, prepare_kvcache, prepare_prefill
from fastattention.attention.validation.common import Options, as_kernels_read
from fastattention.attention.validation.kinds import check_readable
from fastattention.attention.validation.lengths import (
    check_cache,
    check_cache_numbers,
    check_varlen,
    check_varlen_numbers,
)
from fastattention.attention.validation.prefill import MaxSeqlens
from fastattention.backends.common.bounded import BoundedDict
from fastattention.backends.common.traffic import Extent, Traffic
from fastattention.backends.registry import Verdict, check_name, chosen, get_backend, select_backend, verdicts
from fastattention.engine.eager import PLAIN_TYPES, is_traced, transform_level
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.gpu_runtime.module import is_capturing


class Explanation(NamedTuple):
    """Which backend serves a call, every backend's reason, and the call's main-memory traffic. `print` shows a table.

    `traffic` is that of `backend`, or of the one that the call names. None when it cannot serve the call, for a call
    with attn_bias, block_mask or qk_dtype, and for linear attention.
    """

    problem: Any  # the Problem of attention, the LinearProblem of linear attention
    verdicts: tuple[Verdict, ...]
    traffic: Traffic | None = None

    @property
    def backend(self) -> str | None:
        """Name of the backend that `backend="auto"` takes; None when there is none."""
        one = chosen(self.verdicts)
        return None if one is None else one.backend

    def __str__(self) -> str:
        serving = self.backend
        lines = []
        for name, reason, how, why_faster in self.verdicts:
            served = "serves this call" if name == serving else "could serve this call"
            served += f" by {how}" if how else ""
            served += f"; faster here: {why_faster}" if why_faster else ""
            lines.append(f"{'->' if name == serving else '  '} {name}: {reason or served}")
        if self.traffic is not None:
            lines.append(str(self.traffic))
        return "\n".join(lines)


class _Explained(BaseException):
    """Leaves a call that is only explained, at the point where its backend would be chosen."""

    def __init__(self, explanation: Explanation) -> None:
        self.explanation = explanation


# What fast_attn_with_kvcache calls the fields of Inputs.
_KVCACHE_NAMES = {"k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v"}
CallSignature = tuple[object, ...]
_CACHE_SEQLENS = KvCacheArguments._fields.index("cache_seqlens")  # which may be a number
_explaining: ContextVar[bool] = ContextVar("explaining", default=False)
_is_profiling = torch._C._autograd._profiler_enabled


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


class Plan:
    """How calls of one signature are served: by one look-up, checks of numbers, and a launch."""

    def __init__(self, problem: Problem, inputs: Inputs, given: Inputs, backend: str) -> None:
        """inputs: as kernels read them; given: what they were made from."""
        if not isinstance(backend, str):  # the look-up wants what can be hashed
            check_name(backend)  # type: ignore[unreachable]
        selected = select_backend(problem, backend)
        self.problem = problem
        self._range = f"fastattention::{selected.name}"
        self.has_backward = bool(problem.grads) and selected.has_backward
        self.backend = selected
        # Without autograd, and with it.
        self.serve = selected.plan(problem, inputs)
        if selected.reads_numbers and problem.layout is not Layout.DENSE and problem.device.type != "cpu":
            self.serve = functools.partial(_serve_checked, problem, self.serve)
        self.forward = differentiable(selected, problem, self.serve) if self.has_backward else self.serve
        pairs = zip(Inputs._fields, given, inputs, strict=True)
        self._converted = [name for name, before, after in pairs if before is not after]

    def run(self, inputs: Inputs) -> AttentionOutput:
        """Serves a call with the tensors that were given. Profilers see a range with the backend's name."""
        try:
            inputs = self.as_read(inputs)
            if _is_profiling():
                with torch.profiler.record_function(self._range):
                    return self.forward(inputs)
            return self.forward(inputs)
        except RuntimeError:
            names = _KVCACHE_NAMES if self.problem.layout is Layout.KVCACHE else {}
            check_readable({names.get(name, name): tensor for name, tensor in inputs._asdict().items()})
            raise

    def as_read(self, inputs: Inputs) -> Inputs:
        """The tensors of a call as its kernels read them."""
        return as_kernels_read(self.problem, inputs, self._converted) if self._converted else inputs


def _serve_checked(problem: Problem, serve: Callable[[Inputs], AttentionOutput], inputs: Inputs) -> AttentionOutput:
    """A call off the CPU whose backend reads lengths, offsets and page indices: they are checked as on the CPU."""
    if inputs.q.is_cuda and is_capturing():
        raise UnsupportedError(
            "the backend of this call reads the lengths of sequences in host memory, which no CUDA graph can capture; "
            f"q has dtype {problem.dtype}, and backend 'cuda', which does not read them, takes float16 and bfloat16"
        )
    if problem.layout is Layout.VARLEN:
        check_varlen_numbers(inputs, (problem.seqlen_q, problem.seqlen_k), rows_behind=True)
    else:
        check_cache_numbers(problem, inputs)
    return serve(inputs)


_plans: BoundedDict[object, Plan] = BoundedDict()


def forget_plans() -> None:
    """Makes the next calls choose their backends again."""
    _plans.clear()


def signature_of(tensors: Sequence[object], backend: object, *scalars: Hashable) -> CallSignature | None:
    """All that validation and plans read of a call but the numbers in index tensors and addresses.

    None where a call has to be looked at more closely: while something follows it, as in `runs_eagerly`, and for all
    but plain tensors that hold data. scalars: of the types that validation makes of them, since 1 == 1.0 == True
    """
    first = tensors[0]
    if (
        type(backend) is not str
        or is_traced()
        or transform_level() is not None
        or forward_ad._current_level >= 0
        or type(first) not in PLAIN_TYPES
        or first.is_meta  # type: ignore[attr-defined]
        or _explaining.get()
    ):
        return None
    records = torch.is_grad_enabled()
    looks: list[object] = []
    try:
        for tensor in tensors:
            if tensor is None:
                looks.append(None)
            elif type(tensor) in PLAIN_TYPES and not tensor.is_neg():  # type: ignore[attr-defined]
                grad = records and tensor.requires_grad  # type: ignore[attr-defined]
                looks.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, grad))  # type: ignore[attr-defined]
            else:
                return None
    except RuntimeError:  # of tensors without a shape or strides, which validation names
        return None
    return (backend, scalars, *looks)


def plan_prefill(
    signature: CallSignature | None, given: Inputs, max_seqlens: MaxSeqlens | None, options: Options, backend: str
) -> tuple[Plan, Inputs]:
    """The plan of a call without a cache, and its tensors.

    signature: None for a call that is not known by one; given: its tensors as they are; max_seqlens: None for a dense
    call. Of a varlen one the numbers of cu_seqlens and block_table are checked in every call.
    """
    plan = _plans.get(signature)
    if plan is not None:
        if max_seqlens is None:
            return plan, given
        with contextlib.suppress(RuntimeError, TypeError):  # validation names the tensor at fault
            if check_varlen(given, max_seqlens) == (plan.problem.seqlen_q, plan.problem.seqlen_k):
                return plan, given
    problem, inputs = prepare_prefill(given, max_seqlens, options)
    return _new_plan(signature, problem, inputs, given, backend)


def plan_kvcache(
    signature: CallSignature | None,
    arguments: KvCacheArguments,
    options: Options,
    rotary_interleaved: bool,
    num_splits: int,
    backend: str,
    panels: PanelCache | None = None,
) -> tuple[Plan, Inputs]:
    """Likewise of a call with a cache. Lengths, indices and shared memory are checked in every call."""
    plan = _plans.get(signature)
    given = arguments.inputs()
    if plan is not None:
        with contextlib.suppress(RuntimeError, TypeError):  # validation names the tensor at fault
            return plan, check_cache(plan.problem, given, arguments.cache_seqlens)
    problem, inputs = prepare_kvcache(arguments, options, rotary_interleaved, num_splits, panels)
    if given.cache_seqlens is None:
        given = given._replace(cache_seqlens=inputs.cache_seqlens)
    return _new_plan(signature, problem, inputs, given, backend)


def prefill_signature(
    given: Inputs, max_seqlens: MaxSeqlens | None, options: Options, backend: str
) -> CallSignature | None:
    """`signature_of` a call without a cache; maxima that are no integers are read in every call."""
    if max_seqlens is None:
        tensors = (
            given.q, given.k, given.v, given.alibi_slopes, given.attn_bias, given.sinks, given.dropout_seed,
            given.block_mask,
        )  # fmt: skip
        return signature_of(tensors, backend, options)
    longest = tuple([length if type(length) is int else None for length in max_seqlens])
    return signature_of(given, backend, options, longest)


def kvcache_signature(
    arguments: KvCacheArguments,
    options: Options,
    rotary_interleaved: bool,
    num_splits: int,
    backend: str,
    panels: PanelCache | None = None,
) -> CallSignature | None:
    """`signature_of` a call with a cache."""
    if not (type(rotary_interleaved) is bool and type(num_splits) is int):
        return None
    has_one_length = type(arguments.cache_seqlens) is int
    tensors: list[object] = [*arguments]
    if has_one_length:
        tensors[_CACHE_SEQLENS] = None
    return signature_of(tensors, backend, options, rotary_interleaved, num_splits, panels, has_one_length)


def _new_plan(
    signature: CallSignature | None, problem: Problem, inputs: Inputs, given: Inputs, backend: str
) -> tuple[Plan, Inputs]:
    stop_if_explaining(problem, inputs, backend)
    plan = Plan(problem, inputs, given, backend)
    if signature is not None:
        _plans[signature] = plan
    return plan, inputs


def stop_if_explaining(problem: Problem, inputs: Inputs, backend: str) -> None:
    """Ends the call with every backend's verdict where `explain_call` has asked for no more than that."""

    def explanation() -> Explanation:
        check_name(backend)  # an unknown one is an error here as it is in the call
        considered = tuple(verdicts(problem))
        serving = chosen([one for one in considered if backend in ("auto", one.backend)])
        traffic = None
        if serving is not None:
            traffic = get_backend(serving.backend).traffic(problem, Extent.of(problem, inputs))
        return Explanation(problem, considered, traffic)

    explained(explanation)


def explained(explanation: Callable[[], Explanation]) -> None:
    """Ends a call that `explain_call` has made, with this explanation; does nothing in any other."""
    if _explaining.get():
        raise _Explained(explanation())
