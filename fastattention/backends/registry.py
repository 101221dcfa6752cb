"""Chooses the backend of a call: the first in ORDER that gives no reason against it."""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

from fastattention.backends.base import Backend
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.problem import MergeProblem, Problem

# Name -> module:class, most specialised first. Modules are imported when first asked for.
ORDER: dict[str, str] = {
    "cuda": "fastattention.backends.cuda.backend:CudaBackend",
    "ascend": "fastattention.backends.ascend.backend:AscendBackend",
    "cpu": "fastattention.backends.cpu.backend:CpuBackend",
    "sdpa": "fastattention.backends.sdpa.backend:SdpaBackend",
}


class Verdict(NamedTuple):
    """What one backend says of a problem."""

    backend: str
    reason: str | None  # None: it can serve the problem
    how: str = ""  # by which of several means it would


def check_name(name: object) -> None:
    """Raises ArgumentError unless `name` is "auto" or that of a backend."""
    if not isinstance(name, str) or (name != "auto" and name not in ORDER):
        raise _unknown(name)


@functools.cache
def get_backend(name: str) -> Backend:
    """The backend called `name`. Raises ArgumentError for a name that is not registered."""
    if name not in ORDER:
        raise _unknown(name)
    module, _, attribute = ORDER[name].partition(":")
    backend = getattr(importlib.import_module(module), attribute)()
    assert isinstance(backend, Backend)
    return backend


def _unknown(name: object) -> ArgumentError:
    return ArgumentError(f"backend={name!r} is not known; choose 'auto' or one of {', '.join(map(repr, ORDER))}")


def verdict(problem: Problem, name: str) -> Verdict:
    """Whether the backend called `name` can serve `problem`, and if not, why."""
    backend = get_backend(name)
    reason = backend.why_unavailable() or backend.why_not(problem)
    return Verdict(name, reason, backend.how(problem) if reason is None else "")


def verdicts(problem: Problem) -> list[Verdict]:
    """Every backend's verdict, in the order in which they are tried."""
    return [verdict(problem, name) for name in ORDER]


@functools.lru_cache(maxsize=4096)
def select_backend(problem: Problem, name: str = "auto") -> Backend:
    """The backend that serves `problem`.

    name: "auto" for the first that can, or the name of the only one to consider.
    Raises UnsupportedError with every reason when there is none, ArgumentError for an unknown name.
    """
    considered = verdicts(problem) if name == "auto" else [verdict(problem, name)]
    return _first_that_can(considered, "serve this call")


@functools.lru_cache(maxsize=4096)
def select_merging_backend(problem: MergeProblem) -> Backend:
    """The backend that merges parts. Raises UnsupportedError with every reason when there is none."""
    backends = [(name, get_backend(name)) for name in ORDER]
    considered = [Verdict(name, each.why_unavailable() or each.why_not_merge(problem)) for name, each in backends]
    return _first_that_can(considered, "merge these parts")


def _first_that_can(considered: list[Verdict], doing: str) -> Backend:
    for backend, reason, _ in considered:
        if reason is None:
            return get_backend(backend)
    reasons = "\n".join(f"  {backend}: {reason}" for backend, reason, _ in considered)
    raise UnsupportedError(f"no backend can {doing}:\n{reasons}")
