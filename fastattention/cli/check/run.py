"""Runs the list of calls by every implementation of a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention import explain
from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.backends.common.gradients import COMPUTED
from fastattention.cli.check.cases import Check
from fastattention.cli.check.report import CheckReport, Entry, Note
from fastattention.cli.console import first_line
from fastattention.engine.operator import forget_plans
from fastattention.engine.registry import Verdict
from fastattention.testing.calls import Call, build_call
from fastattention.testing.devices import copied_back, moved
from fastattention.testing.oracle import FACTOR, FACTOR_OF_TORCH_GRADIENTS, expected_after, present, results_of
from fastattention.testing.written import Snapshot


class Implementation(NamedTuple):
    """How a call is computed: a backend and its settings."""

    name: str
    backend: str  # as calls name it
    variables: Mapping[str, str] = {}  # of the environment meanwhile
    control: bool = False  # runs only the checks that are marked so


CONTROL = Implementation("sdpa", "sdpa", control=True)
IMPLEMENTATIONS = {
    "npu": (
        CONTROL,
        Implementation("vendor", "ascend", {"FASTATTENTION_ASCEND": "vendor"}),
        Implementation("triton", "ascend", {"FASTATTENTION_ASCEND": "triton"}),
        Implementation("default", "auto", {"FASTATTENTION_ASCEND": ""}),
    ),
    "cuda": (CONTROL, Implementation("cuda", "cuda")),
    "cpu": (CONTROL, Implementation("cpu", "cpu")),
}


def runs_of(checks: Sequence[Check], implementations: Sequence[Implementation]) -> list[tuple[Check, Implementation]]:
    """Every check by everyone who runs it. All by one first: should the next crash, those are in the report."""
    return [(one, by) for by in implementations for one in checks if one.control or not by.control]


def run(report: CheckReport, one: Check, implementation: Implementation, device: str) -> bool:
    """Adds an entry for a call. False where the device does not answer any more, as after an illegal access."""
    call = build_call(one.case, one.dtype)
    known = {
        "kind": "call",
        "name": one.case.name,
        "dtype": str(one.dtype).removeprefix("torch."),
        "implementation": implementation.name,
        "call": str(call),
    }
    entry = report.attempt(known, partial(_run, one, call, implementation, device))
    if entry["state"] == "failed" and (reason := _why_lost(device)) is not None:
        report.stop(f"the device does not answer after this call: {reason}")
        return False
    return True


def _run(one: Check, call: Call, implementation: Implementation, device: str, note: Note) -> Entry:
    grads = present(one.case, COMPUTED) if one.gradients else ()
    for name in grads:
        call.arguments[name].requires_grad_()
    before = Snapshot.of(call)

    def attention(call: Call) -> tuple[Tensor, Tensor | None]:
        there = moved(call, device)
        out, lse = (
            there.run(implementation.backend) if one.lse else (there.run_without_lse(implementation.backend), None)
        )
        copied_back(call, there)
        return out.cpu(), None if lse is None else lse.cpu()

    with _settings(implementation.variables):
        verdict = _verdict(moved(call, device), implementation.backend, one.lse)
        if verdict.reason is not None:
            return {"state": "refused", "reason": verdict.reason}
        note({"served_by": f"{verdict.backend}: {verdict.how}" if verdict.how else verdict.backend})
        begin = time.perf_counter()
        found = results_of(call, attention, grads)
        seconds = time.perf_counter() - begin
    factor = FACTOR_OF_TORCH_GRADIENTS if grads and verdict.backend == "sdpa" else FACTOR
    errors = expected_after(call, one.case, grads, one.lse, device).errors(found, factor)
    entry: Entry = {"errors": {name: error._asdict() for name, error in errors.items()}, "seconds": seconds}
    if found["out"].dtype is not one.dtype:
        entry["reason"] = f"out is {found['out'].dtype}, not {one.dtype}"
    elif (fault := before.fault(one.case, call, one.dtype)) is not None:
        entry["reason"] = fault
    is_right = all(error.is_small for error in errors.values()) and "reason" not in entry
    return {"state": "right" if is_right else "wrong", **entry}


def _verdict(call: Call, backend: str, return_lse: bool) -> Verdict:
    """Which backend serves the call, or why none does."""
    explanation = explain(function=call.function, backend=backend, return_lse=return_lse, **call.arguments)
    name = explanation.backend if backend == "auto" else backend
    if name is None:
        return Verdict("auto", "; ".join(f"{one.backend}: {one.reason}" for one in explanation.verdicts))
    return next(one for one in explanation.verdicts if one.backend == name)


@contextmanager
def _settings(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a while. Backends are chosen anew when they change."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _choose_anew()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _choose_anew()


@contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of the backends that serve calls meanwhile."""
    served: set[str] = set()
    backends = [ATTENTION_BACKENDS.get(name) for name in ATTENTION_BACKENDS.order]

    def noting(backend: AttentionBackend) -> Callable[[Problem, Inputs], Callable[[Inputs], AttentionOutput]]:
        make_call = backend.make_call

        def noted(problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
            served.add(backend.name)
            return make_call(problem, inputs)

        return noted

    _choose_anew()  # so that each call is planned
    for backend in backends:
        vars(backend)["make_call"] = noting(backend)
    try:
        yield served
    finally:
        for backend in backends:
            del vars(backend)["make_call"]
        _choose_anew()


def _choose_anew() -> None:
    ATTENTION_BACKENDS.forget_choices()
    forget_plans()


def _why_lost(device: str) -> str | None:
    """Why the device no longer computes, or None where it does."""
    try:
        torch.ones(1, dtype=torch.float32, device=device).add(1.0).cpu()
    except RuntimeError as error:
        return first_line(error)
    return None
