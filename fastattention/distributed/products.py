"""torch's matrix products beside a kernel that holds multiprocessors for long.

cuBLAS launches as many CTAs as a GPU has multiprocessors, and each takes its part of the tiles. Where other kernels
hold some, CTAs that find no place begin when others have ended: with 8 of 132 held, products of 1024 to 4096 rows take
1.2 to 1.8 times as long. Told of it, cuBLAS shares the tiles out among those that are free: 1.1 times.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

import torch

_AS_ALWAYS = contextlib.nullcontext()


def products_leave_free(multiprocessors: int, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """In it, products that the current thread enqueues on the current stream leave so many multiprocessors to others.

    Where cuBLAS cannot be told, they do not.
    """
    library = _cublas() if multiprocessors and device.type == "cuda" else None
    return _AS_ALWAYS if library is None else _told(library, _num_multiprocessors(device) - multiprocessors)


@contextlib.contextmanager
def _told(library: ctypes.CDLL, multiprocessors: int) -> Iterator[None]:
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())  # type: ignore[no-untyped-call]
    before = ctypes.c_int()
    library.cublasGetSmCountTarget(handle, ctypes.byref(before))
    library.cublasSetSmCountTarget(handle, multiprocessors)
    try:
        yield
    finally:
        library.cublasSetSmCountTarget(handle, before)


@functools.cache
def _cublas() -> ctypes.CDLL | None:
    """The library that torch has loaded, if it has these functions."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}")
        _ = library.cublasSetSmCountTarget, library.cublasGetSmCountTarget
    except (OSError, AttributeError):
        return None
    return library


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
