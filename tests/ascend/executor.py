"""Runs kernels on the processor: their MLIR through LLVM to machine code, called once for every program.

The parts of an NPU are one program here, so the split between Cube and Vector units, their buffers and flags are not
tested. The arithmetic is: every load, mask, product and rounding is the one in the MLIR. Products are summed up in
float32, exponentials are the C library's.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ascend.llvm import build
from ascend.lowering import Lowered, Variant, lower, variant_of
from fastattention.attention.problem import Problem
from fastattention.backends.ascend.backend import AscendBackend
from fastattention.backends.ascend.call import Launch
from fastattention.backends.ascend.chips import CHIPS, Chip

_GRID = 3  # axes of a grid

_Word = ctypes.c_void_p | ctypes.c_int64 | ctypes.c_int32 | ctypes.c_float
_SCALARS: dict[str, Callable[..., _Word]] = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
_ELEMENTS = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.int8: "i8", torch.int32: "i32"}


class ExecutionError(Exception):
    """A launch does not fit the machine code of a kernel, or the kernel accesses memory outside its arguments."""


class CpuExecutedAscendBackend(AscendBackend):
    """The ascend backend with our kernels, on tensors of the processor, as if on one chip."""

    name = "ascend-910B3"
    chip: ClassVar[Chip] = CHIPS["910B3"]

    def why_unavailable(self) -> str | None:
        return None

    def describe(self) -> str:
        return f"executed on the processor, as if on {self.chip.name}"

    def _implementations(self) -> tuple[str, ...]:
        return ("triton",)

    def _why_not_device(self, problem: Problem) -> str | None:
        return None if problem.device.type == "cpu" else f"tensors are on {problem.device}; this runs on cpu"

    def _chip(self, problem: Problem) -> Chip:
        return self.chip

    def _launch(self, launch: Launch) -> None:
        execute(launch)


def execute(launch: Launch) -> None:
    """Runs every program of a launch, the last one first, since none may need what another has done.

    Raises ExecutionError when it loads or stores outside its arguments.
    """
    variant = variant_of(launch)
    lowered = lower(variant)
    words = _words(launch, variant, lowered)
    library = _library(lowered)
    kernel = getattr(library, lowered.name)
    ranges = _ranges(launch)  # kept until all programs have run
    library.fastattention_begin(ranges, ctypes.c_int64(len(ranges)))
    sizes = [ctypes.c_int32(size) for size in (launch.num_programs, 1, 1)]
    for program in reversed(range(launch.num_programs)):
        kernel(*words, *sizes, ctypes.c_int32(program), ctypes.c_int32(0), ctypes.c_int32(0))
        if error := library.fastattention_error():
            raise ExecutionError(f"{variant}: program {program} of {launch.num_programs} {error.decode()}")


@functools.cache
def _library(lowered: Lowered) -> ctypes.CDLL:
    library = ctypes.CDLL(str(build(lowered.name, lowered.text)))
    getattr(library, lowered.name).restype = None
    library.fastattention_begin.restype = None
    library.fastattention_error.restype = ctypes.c_char_p
    return library


class _Range(ctypes.Structure):
    """The memory of an argument."""

    _fields_: ClassVar = [("begin", ctypes.c_void_p), ("bytes", ctypes.c_int64)]


def _ranges(launch: Launch) -> ctypes.Array[_Range]:
    tensors = [value for value in launch.arguments.values() if isinstance(value, Tensor)]
    ranges = [_Range(tensor.data_ptr(), _extent(tensor) * tensor.itemsize) for tensor in tensors]
    return (_Range * len(ranges))(*ranges)


def _extent(tensor: Tensor) -> int:
    """Elements from its first to its last one, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _words(launch: Launch, variant: Variant, lowered: Lowered) -> list[_Word]:
    """The arguments of a launch as the kernel takes them, from the first to those that say which program runs."""
    nothing = torch.empty(0, dtype=torch.int8)
    # Locks and memory that the vendor's compiler would use between units, then the arguments, then grid and place.
    values = [nothing, nothing, *(launch.arguments[name] for name in variant.run_time)]
    types = lowered.types[: -2 * _GRID]
    if len(values) != len(types) or set(lowered.types[-2 * _GRID :]) != {"i32"}:
        raise ExecutionError(f"{lowered.name} takes {lowered.types}, and is given {variant.run_time}")
    words: list[_Word] = []
    for name, value, kind in zip(("lock", "workspace", *variant.run_time), values, types, strict=True):
        if isinstance(value, Tensor):
            if kind != f"memref<?x{_ELEMENTS[value.dtype]}>":
                raise ExecutionError(f"{lowered.name}: {name} is {kind}, and is given {value.dtype}")
            address = ctypes.c_void_p(value.data_ptr())
            words += [address, address, ctypes.c_int64(0), ctypes.c_int64(_extent(value)), ctypes.c_int64(1)]
        else:
            words.append(_SCALARS[kind](value))
    return words
