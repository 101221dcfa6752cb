"""The number of threads of the cpu backend."""

from __future__ import annotations

import torch

from fastattention.errors import ArgumentError

MOST_THREADS = 1024

_override: int | None = None


def get_num_threads() -> int:
    """Threads the cpu backend uses: the number that was set, otherwise torch.get_num_threads()."""
    return torch.get_num_threads() if _override is None else _override


def set_num_threads(num_threads: int | None) -> None:
    """Sets the number of threads of the cpu backend, including the caller; None follows torch.get_num_threads().

    Results do not depend on it. Raises ArgumentError unless num_threads is None or 1 to MOST_THREADS.
    """
    global _override
    if num_threads is not None and (type(num_threads) is not int or not 1 <= num_threads <= MOST_THREADS):
        raise ArgumentError(
            f"num_threads={num_threads!r} must be an integer of 1 to {MOST_THREADS}, or None to follow torch"
        )
    _override = num_threads
