"""Atomic writes of files that several processes share."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that others see complete or not at all, and makes its folder. Raises OSError."""
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
