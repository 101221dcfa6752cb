"""Removes the owner's names and paths from a report, because it is going to be published."""

from __future__ import annotations

import getpass
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fastattention.cli.machine import SOURCES

IMPERSONAL = ("root", "localhost")  # users and hosts whose names may stay
# Fields of entries whose words are ours, even if a user has such a name.
IMPERSONAL_KEYS = ("device", "kind", "name", "dtype", "implementation", "call", "state", "served_by")


class Anonymiser:
    """Replaces paths and names in all text of a report.

    paths: each with its replacement; the longest match wins
    names: each with its replacement, where it is a word of its own
    hosts: as names, with the domain that follows
    """

    def __init__(
        self, paths: Iterable[tuple[Path, str]], names: Iterable[tuple[str, str]], hosts: Iterable[str] = ()
    ) -> None:
        # "/" tells no name, and is in every path.
        known = {str(path): shown for path, shown in paths if len(path.parts) > 1}
        longest_first = sorted(known.items(), key=lambda pair: -len(pair[0]))
        # A path is not replaced within a longer one, but it is after a compiler's flag, as in -I/home/...
        before = r"(?:(?<![\w.-])|(?<=-[A-Za-z]))"
        self._patterns = [(rf"{before}{re.escape(path)}(?![\w-])", shown) for path, shown in longest_first]
        words = [(name, shown, "") for name, shown in names]
        words += [(host.partition(".")[0], "<host>", r"(?:\.[A-Za-z0-9][\w-]*)*") for host in hosts]
        self._patterns += [
            (rf"(?<![A-Za-z0-9]){re.escape(name)}{more}(?![A-Za-z0-9])", shown)
            for name, shown, more in words
            if name and name not in IMPERSONAL
        ]

    @classmethod
    def of_this_machine(cls) -> Anonymiser:
        """An Anonymiser for the user, the host and the folders of this process."""
        paths = [(SOURCES, "<sources>"), (Path.cwd(), "<folder>")]
        if sys.prefix != sys.base_prefix:  # a virtual environment; the system's folder tells no name
            paths.append((Path(sys.prefix), "<python>"))
        names: list[tuple[str, str]] = []
        try:
            paths.append((Path.home(), "<home>"))
            names.append((getpass.getuser(), "<user>"))
        except (RuntimeError, OSError, KeyError):  # the system does not know the user
            pass
        return cls([*paths, *((path.resolve(), shown) for path, shown in paths)], names, [socket.gethostname()])

    def __call__(self, value: Any) -> Any:
        """The same value without these names and paths."""
        if isinstance(value, str):
            for pattern, shown in self._patterns:
                value = re.sub(pattern, shown, value)
            return value
        if isinstance(value, dict):
            return {name: one if name in IMPERSONAL_KEYS else self(one) for name, one in value.items()}
        return [self(one) for one in value] if isinstance(value, (list, tuple)) else value
