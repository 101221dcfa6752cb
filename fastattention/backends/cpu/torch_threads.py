"""Finds the OpenMP team of torch, whose threads do our work too (kernels/omp_team.hpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch

_TORCH_LIBRARY = "libtorch_cpu.so"


class OpenMp(NamedTuple):
    """Addresses of functions of an OpenMP; 0 for none."""

    parallel: int = 0  # GOMP_parallel
    max_threads: int = 0  # omp_get_max_threads


def find_openmp() -> OpenMp:
    """That of torch, which is loaded. None where torch has threads of another kind, or its library lies elsewhere."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return OpenMp()
    try:
        # Symbols are looked up in what it depends on, too: in its own OpenMP, of several in a process.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _TORCH_LIBRARY))
        names = ("GOMP_parallel", "omp_get_max_threads")
        return OpenMp(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))
    except (OSError, AttributeError):
        return OpenMp()
