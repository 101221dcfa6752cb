"""Finds or makes the plan of a call of linear attention: the first backend in ORDER that has no reason against it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence

from torch import Tensor

from fastattention.attention.dispatch import CallSignature, Explanation, explained, signature_of
from fastattention.backends.common.bounded import BoundedDict
from fastattention.backends.registry import Verdict, chosen
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.linear.backend import LinearBackend
from fastattention.linear.problem import LinearInputs, LinearOutput, LinearProblem
from fastattention.linear.validation import LinearOptions, as_backends_read, check_offsets, prepare

# Name -> module:class, most specialized first. Modules are imported when first asked for.
ORDER: dict[str, str] = {
    "cuda": "fastattention.backends.cuda.linear.backend:CudaLinearBackend",
    "cpu": "fastattention.backends.cpu.linear.backend:CpuLinearBackend",
    "torch": "fastattention.backends.torch.linear:TorchBackend",
}


def check_name(name: object) -> None:
    """Raises ArgumentError unless `name` is "auto" or that of a backend."""
    if not isinstance(name, str) or (name != "auto" and name not in ORDER):
        raise ArgumentError(f"backend={name!r} is not known; choose 'auto' or one of {', '.join(map(repr, ORDER))}")


@functools.cache
def get_backend(name: str) -> LinearBackend:
    """The backend called `name`, which is one of ORDER."""
    module, _, attribute = ORDER[name].partition(":")
    backend = getattr(importlib.import_module(module), attribute)()
    assert isinstance(backend, LinearBackend)
    return backend


def verdict(problem: LinearProblem, name: str) -> Verdict:
    """Whether the backend called `name` can serve `problem`, and if not, why."""
    backend = get_backend(name)
    reason = backend.why_unavailable() or backend.why_not(problem)
    return Verdict(name, reason, "" if reason else backend.how(problem))


def select_backend(problem: LinearProblem, name: str) -> LinearBackend:
    """The backend that serves `problem`. Raises UnsupportedError with every reason when there is none."""
    check_name(name)
    considered = [verdict(problem, each) for each in (ORDER if name == "auto" else (name,))]
    if (one := chosen(considered)) is not None:
        return get_backend(one.backend)
    reasons = "\n".join(f"  {one.backend}: {one.reason}" for one in considered)
    raise UnsupportedError(f"no backend can serve this call:\n{reasons}")


class LinearPlan:
    """How calls of one signature are served."""

    def __init__(self, problem: LinearProblem, inputs: LinearInputs, given: LinearInputs, backend: str) -> None:
        self.problem = problem
        self._copies = any(before is not after for before, after in zip(given, inputs, strict=True))
        self._serve = select_backend(problem, backend).plan(problem, inputs)

    def run(self, given: LinearInputs) -> LinearOutput:
        """Serves a call with the tensors that were given."""
        return self._serve(as_backends_read(given) if self._copies else given)


_plans: BoundedDict[object, LinearPlan] = BoundedDict()


def linear_signature(given: Sequence[Tensor | None], options: LinearOptions, backend: str) -> CallSignature | None:
    """What a plan depends on; None for a call that has to be looked at more closely."""
    return signature_of(given, backend, options)


def plan_linear(
    signature: CallSignature | None, given: LinearInputs, options: LinearOptions, backend: str
) -> LinearPlan:
    """The plan of a call. Raises as the call does, and ends one that is only explained."""
    plan = _plans.get(signature)
    if plan is not None:
        if given.cu_seqlens is not None:
            check_offsets(given.cu_seqlens, plan.problem.seqlen)
        return plan
    problem, inputs = prepare(given, options)
    explained(lambda: Explanation(problem, tuple(verdict(problem, each) for each in ORDER)))
    plan = LinearPlan(problem, inputs, given, backend)
    if signature is not None:
        _plans[signature] = plan
    return plan
