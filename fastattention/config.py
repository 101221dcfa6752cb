"""Every environment variable the package reads, and nothing else."""

from __future__ import annotations

import os


def cpu_isa() -> str | None:
    """FASTATTENTION_CPU_ISA: the instruction set of the cpu backend; `fastattention info` lists those of this machine.

    Unset or empty: the best one the processor has.
    """
    return os.environ.get("FASTATTENTION_CPU_ISA") or None


def cpu_library() -> str | None:
    """FASTATTENTION_CPU_LIBRARY: path of the native library to load instead of the installed one (sanitizer builds)."""
    return os.environ.get("FASTATTENTION_CPU_LIBRARY") or None
