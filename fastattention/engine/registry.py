"""Registry: the backends of an operator, and the choice among them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from fastattention.engine.backend import Backend, P
from fastattention.engine.bounded import BoundedDict
from fastattention.errors import ArgumentError, UnsupportedError


class Verdict(NamedTuple):
    """One backend's answer for a problem."""

    backend: str
    reason: str | None  # None: it can serve the problem
    how: str = ""  # the means by which it would serve it, if there are several
    why_faster: str | None = None  # why it is faster than those before it


B = TypeVar("B", bound=Backend[Any, Any, Any])


class Registry(Generic[P, B]):
    """Backends by name, most specialized first. Modules are imported when they are first asked for."""

    def __init__(self, order: Mapping[str, str]) -> None:
        """order: name -> "module:class"."""
        self.order = dict(order)
        self._backends: dict[str, B] = {}
        self._selected: BoundedDict[tuple[P, str], B] = BoundedDict()

    def check_name(self, name: object) -> None:
        """Raises ArgumentError unless `name` is "auto" or the name of a backend."""
        if not isinstance(name, str) or (name != "auto" and name not in self.order):
            known = ", ".join(map(repr, self.order))
            raise ArgumentError(f"backend={name!r} is not known; choose 'auto' or one of {known}")

    def get(self, name: str) -> B:
        """The backend called `name`. Raises ArgumentError for a name that is not registered."""
        backend = self._backends.get(name)
        if backend is None:
            if name not in self.order:
                raise ArgumentError(f"backend={name!r} is not known; it must be one of {', '.join(self.order)}")
            module, _, attribute = self.order[name].partition(":")
            made = getattr(importlib.import_module(module), attribute)()
            assert isinstance(made, Backend)
            backend = self._backends.setdefault(name, made)  # type: ignore[arg-type]
        return backend

    def verdict(self, problem: P, name: str) -> Verdict:
        """Whether the backend called `name` can serve `problem`, and if not, why."""
        backend = self.get(name)
        reason = backend.why_unavailable() or backend.why_not(problem)
        if reason is not None:
            return Verdict(name, reason)
        return Verdict(name, None, backend.how(problem), backend.why_faster(problem))

    def verdicts(self, problem: P) -> list[Verdict]:
        """Every backend's verdict, in the order in which they are tried."""
        return [self.verdict(problem, name) for name in self.order]

    def select(self, problem: P, name: str = "auto") -> B:
        """The backend that serves `problem`.

        name: "auto" for the backend that is `chosen`, or the name of the only one to consider.
        Raises UnsupportedError with every reason when there is none, ArgumentError for an unknown name.
        """
        self.check_name(name)
        backend = self._selected.get((problem, name))
        if backend is None:
            considered = self.verdicts(problem) if name == "auto" else [self.verdict(problem, name)]
            backend = self._selected[problem, name] = self.get(serving(considered, "serve this call"))
        return backend

    def forget_choices(self) -> None:
        """Asks the backends anew which problems they serve, where the environment has changed."""
        self._selected.clear()

    def forget(self) -> None:
        """Makes the next calls create the backends anew too."""
        self._backends.clear()
        self._selected.clear()


def chosen(considered: Sequence[Verdict]) -> Verdict | None:
    """The verdict that "auto" takes: the first that can serve the problem and is faster, else the first that can."""
    able = [one for one in considered if one.reason is None]
    return next((one for one in able if one.why_faster is not None), able[0] if able else None)


def serving(considered: Sequence[Verdict], doing: str) -> str:
    """The name of the backend that is `chosen`. Raises UnsupportedError with every reason when there is none."""
    if (one := chosen(considered)) is not None:
        return one.backend
    reasons = "\n".join(f"  {one.backend}: {one.reason}" for one in considered)
    raise UnsupportedError(f"no backend can {doing}:\n{reasons}")
