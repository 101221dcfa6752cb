"""Runs the probes: small kernels that test the emulator."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, ClassVar

import emulator
import numpy as np
import numpy.typing as npt
from emulator import Range, Report

NONE, WARP, CTA = 0, 1, 2  # barriers


class Arguments(ctypes.Structure):
    """The arguments of every probe, as in probes.hpp."""

    _fields_: ClassVar = [
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("first", ctypes.c_int32),
        ("second", ctypes.c_int32),
        ("barrier", ctypes.c_int32),
    ]


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The library of a source file next to this one."""
    return ctypes.CDLL(str(emulator.build(name, Path(__file__).parent / f"{name}.cpp")))


def aligned(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that begins at a multiple of 64 bytes."""
    buffer = np.zeros(values.nbytes + 64, dtype=np.uint8)
    begin = -buffer.ctypes.data % 64
    copy = buffer[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def probe(
    name: str,
    source: npt.NDArray[Any] | None = None,
    target: npt.NDArray[Any] | None = None,
    first: int = 0,
    second: int = 0,
    barrier: int = NONE,
    num_ctas: int = 1,
    file: str = "probes",
) -> Report:
    """Runs a probe on two arrays, which are all it may access."""
    source = aligned(np.zeros(64, np.uint8)) if source is None else source
    target = aligned(np.zeros(64, np.uint8)) if target is None else target
    arguments = Arguments(source.ctypes.data, target.ctypes.data, first, second, barrier)
    ranges = [Range(array.ctypes.data, array.nbytes) for array in (source, target)]
    return emulator.checked(getattr(library(file), f"probe_{name}"), name, arguments, emulator.Grid(num_ctas), ranges)
