"""How many threads the cpu backend may use."""

from __future__ import annotations

import torch

from fastattention.errors import ArgumentError

_override: int | None = None


def get_num_threads() -> int:
    """Threads the cpu backend uses: the number set, otherwise torch.get_num_threads()."""
    return torch.get_num_threads() if _override is None else _override


def set_num_threads(num_threads: int | None) -> None:
    """Sets the number of threads of the cpu backend, the caller's included; None follows torch.get_num_threads().

    Results do not depend on it. Raises ArgumentError unless num_threads is None or at least 1.
    """
    global _override
    if num_threads is not None and (not isinstance(num_threads, int) or num_threads < 1):
        raise ArgumentError(f"num_threads={num_threads!r} must be an integer of at least 1, or None to follow torch")
    _override = num_threads
