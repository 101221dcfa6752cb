"""Runs the list of calls by every implementation of a device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from fastattention import explain
from fastattention.attention.backend import ATTENTION_BACKENDS, AttentionBackend
from fastattention.attention.problem import AttentionOutput, Inputs, Problem
from fastattention.cli.check.calls import Call, build_call
from fastattention.cli.check.cases import Case
from fastattention.cli.check.judge import SEED, results_of, wanted_of
from fastattention.cli.check.report import CheckReport, Entry, Note
from fastattention.cli.console import first_line
from fastattention.engine.operator import forget_plans
from fastattention.engine.registry import Verdict


class Implementation(NamedTuple):
    """Who computes a call."""

    name: str
    backend: str  # as calls name it
    variables: Mapping[str, str] = {}  # of the environment meanwhile
    control: bool = False  # of cases marked so alone


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


def runs_of(cases: Sequence[Case], implementations: Sequence[Implementation]) -> list[tuple[Case, Implementation]]:
    """Every case by everyone who runs it. All by one first: should the next crash, those are in the report."""
    return [(case, one) for one in implementations for case in cases if case.control or not one.control]


def run(report: CheckReport, case: Case, implementation: Implementation, device: str) -> bool:
    """Adds an entry for a call. False where the device does not answer any more, as after an illegal access."""
    given = build_call(case)
    known = {
        "kind": "call",
        "name": case.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "implementation": implementation.name,
        "call": str(given),
    }
    entry = report.attempt(known, partial(_run, case, given, implementation, device))
    if entry["state"] == "failed" and (reason := _why_lost(device)) is not None:
        report.stop(f"the device does not answer after this call: {reason}")
        return False
    return True


def _run(case: Case, given: Call, implementation: Implementation, device: str, note: Note) -> Entry:
    with _settings(implementation.variables):
        call = given.on(device)
        verdict = _verdict(call, implementation.backend)
        if verdict.reason is not None:
            return {"state": "refused", "reason": verdict.reason}
        note({"served_by": f"{verdict.backend}: {verdict.how}" if verdict.how else verdict.backend})
        wanted = wanted_of(case, device)
        torch.manual_seed(SEED)
        begin = time.perf_counter()
        result = call.function(**call.arguments(), backend=implementation.backend)
        out, lse = result if case.lse else (result, None)
        found = results_of(case, given, call, out, lse)
        seconds = time.perf_counter() - begin
    errors = wanted.judge(found, by_torch=verdict.backend == "sdpa")
    is_right = out.dtype is case.dtype and all(one["error"] <= one["allowed"] for one in errors.values())
    return {"state": "right" if is_right else "wrong", "errors": errors, "seconds": seconds}


def _verdict(call: Call, backend: str) -> Verdict:
    """Of the backend that serves the call, or why nobody does."""
    explanation = explain(function=call.function, backend=backend, **call.arguments())
    name = explanation.backend if backend == "auto" else backend
    if name is None:
        return Verdict("auto", "; ".join(f"{one.backend}: {one.reason}" for one in explanation.verdicts))
    return next(one for one in explanation.verdicts if one.backend == name)


@contextmanager
def _settings(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for a while. Backends are chosen anew when they change."""
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
    """Why the device computes nothing any more, or None where it does."""
    try:
        torch.ones(1, dtype=torch.float32, device=device).add(1.0).cpu()
    except RuntimeError as error:
        return first_line(error)
    return None
