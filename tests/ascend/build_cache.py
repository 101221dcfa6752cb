"""A cache of built files, keyed by content."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE = Path(__file__).parents[2] / "build" / "ascend"


def cached_file(name: str, make: Callable[[Path], None]) -> Path:
    """The file called `name`, which holds the hash of what it is made from; `make` writes it when it is not there."""
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / name
            make(made)
            os.replace(made, path)
    return path
