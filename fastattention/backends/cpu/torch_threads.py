"""Finds the OpenMP team of torch, whose threads do our work too (kernels/common/omp_team.hpp)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import NamedTuple

import torch

_TORCH_LIBRARY = "libtorch_cpu.so"


class OpenMp(NamedTuple):
    """Addresses of functions of an OpenMP library; 0 for none."""

    parallel: int = 0  # GOMP_parallel
    max_threads: int = 0  # omp_get_max_threads


def find_openmp() -> OpenMp:
    """Functions of torch's OpenMP; zeros where torch is built without OpenMP or its library is not found."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return OpenMp()
    try:
        # Looks the symbols up in torch's own dependencies: a process may have several OpenMP libraries.
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / _TORCH_LIBRARY))
        names = ("GOMP_parallel", "omp_get_max_threads")
        return OpenMp(*(ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in names))
    except (OSError, AttributeError):
        return OpenMp()
