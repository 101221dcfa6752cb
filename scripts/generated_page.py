"""A page that a script generates: written, or with --check compared with the committed one. Needs no packages."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def write_or_check(path: Path, page: str, arguments: Sequence[str], command: str) -> int:
    """Writes `page`, or with --check compares it. Returns 1 if it is stale.

    command: the command that writes it, for the message
    """
    if list(arguments) == ["--check"]:
        stale = not path.exists() or path.read_text(encoding="utf-8") != page
        if stale:
            print(f"{os.path.relpath(path)} is stale; run {command}")
        return int(stale)
    if arguments:
        raise SystemExit(f"unknown arguments {' '.join(arguments)}; allowed is --check")
    path.write_text(page, encoding="utf-8")
    return 0
