"""Chooses the backend of a call: the first in ORDER that gives no reason against it, or one that is faster here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import NamedTuple

from fastattention.attention.problem import MergeProblem, Problem
from fastattention.backends.base import Backend
from fastattention.errors import ArgumentError, UnsupportedError

# Name -> module:class, most specialized first. Modules are imported when first asked for.
ORDER: dict[str, str] = {
    "cuda": "fastattention.backends.cuda.attention.backend:CudaBackend",
    "ascend": "fastattention.backends.ascend.backend:AscendBackend",
    "cpu": "fastattention.backends.cpu.backend:CpuBackend",
    "sdpa": "fastattention.backends.sdpa.backend:SdpaBackend",
}


class Verdict(NamedTuple):
    """What one backend says of a problem."""

    backend: str
    reason: str | None  # None: it can serve the problem
    how: str = ""  # by which of several means it would
    why_faster: str | None = None  # than those before it


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
    if reason is not None:
        return Verdict(name, reason)
    return Verdict(name, None, backend.how(problem), backend.why_faster(problem))


def verdicts(problem: Problem) -> list[Verdict]:
    """Every backend's verdict, in the order in which they are tried."""
    return [verdict(problem, name) for name in ORDER]


def chosen(considered: Sequence[Verdict]) -> Verdict | None:
    """The one of `backend="auto"`: the first that can serve the problem and is faster, or else the first that can."""
    able = [one for one in considered if one.reason is None]
    return next((one for one in able if one.why_faster is not None), able[0] if able else None)


@functools.lru_cache(maxsize=4096)
def select_backend(problem: Problem, name: str = "auto") -> Backend:
    """The backend that serves `problem`.

    name: "auto" for the one that is `chosen`, or the name of the only one to consider.
    Raises UnsupportedError with every reason when there is none, ArgumentError for an unknown name.
    """
    considered = verdicts(problem) if name == "auto" else [verdict(problem, name)]
    return _backend_of(considered, "serve this call")


@functools.lru_cache(maxsize=4096)
def select_merging_backend(problem: MergeProblem) -> Backend:
    """The backend that merges parts. Raises UnsupportedError with every reason when there is none."""
    backends = [(name, get_backend(name)) for name in ORDER]
    considered = [Verdict(name, each.why_unavailable() or each.why_not_merge(problem)) for name, each in backends]
    return _backend_of(considered, "merge these parts")


def _backend_of(considered: Sequence[Verdict], doing: str) -> Backend:
    if (one := chosen(considered)) is not None:
        return get_backend(one.backend)
    reasons = "\n".join(f"  {one.backend}: {one.reason}" for one in considered)
    raise UnsupportedError(f"no backend can {doing}:\n{reasons}")
