"""Runs the CUDA kernels on the processor, through emulator/: the same sources, compiled by the C++ compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import functools
import hashlib
import math
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from fastattention import files
from fastattention.attention.problem import AttentionOutput, Inputs, Layout, MergeProblem, Problem
from fastattention.backends.common.c_struct import Params
from fastattention.backends.cuda.attention.backend import CudaBackend
from fastattention.backends.cuda.attention.backward import query_sums_shape
from fastattention.backends.cuda.attention.config import KERNEL_FOLDERS, AttentionConfig, BackwardConfig, MergeConfig
from fastattention.backends.cuda.attention.launches import Launches
from fastattention.backends.cuda.attention.params import AttentionParams, BackwardParams, MergeParams, QuantizeParams
from fastattention.backends.cuda.attention.scratch import Scratch
from fastattention.gpu_runtime.cache import HEADERS, hash_sources
from fastattention.gpu_runtime.chips import CHIPS, Limits
from fastattention.gpu_runtime.module import KernelLaunch
from fastattention.gpu_runtime.variant import Variant

HERE = Path(__file__).parent
SOURCES = HERE / "emulator"
CACHE = HERE.parents[1] / "build" / "emulator"
# A kernel takes longer to compile than to run, so it is optimized less than the emulator.
COMPILE = ("c++", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wno-unknown-pragmas")
MACHINE_OPTIONS, KERNEL_OPTIONS = ("-O2", "-r", "-nostdlib"), ("-O1",)
MACHINE = ("fiber.cpp", "banks.cpp", "shared_memory.cpp", "collectives.cpp", "flags.cpp", "machine.cpp")


class EmulatorError(Exception):
    """A kernel did something that a GPU does not allow or define."""


class Range(ctypes.Structure):
    """Global memory that a kernel may access."""

    _fields_: ClassVar = [("address", ctypes.c_uint64), ("bytes", ctypes.c_int64)]


class Grid(ctypes.Structure):
    """The CTAs of a launch. shuffle: 0, or a seed for the order in which CTAs, and warps within each, run."""

    _fields_: ClassVar = [
        ("num_ctas", ctypes.c_int64),
        ("shuffle", ctypes.c_uint64),
        ("num_warps", ctypes.c_int32),
        ("shared_bytes", ctypes.c_uint32),
    ]


class Wavefronts(ctypes.Structure):
    """Wavefronts of shared memory, and their number without bank conflicts."""

    _fields_: ClassVar = [("counted", ctypes.c_int64), ("ideal", ctypes.c_int64)]


class Report(ctypes.Structure):
    """The report of a launch."""

    _fields_: ClassVar = [
        ("loads", Wavefronts),
        ("stores", Wavefronts),
        ("matrices", Wavefronts),
        ("copies", Wavefronts),
        ("error", ctypes.c_char * 512),
    ]


@functools.cache
def _compiler() -> str:
    """The version of the compiler, because only this one reads its precompiled headers."""
    return subprocess.run([COMPILE[0], "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _hash(folders: tuple[Path, ...]) -> str:
    """The hash of all sources in some folders."""
    return hash_sources(folders, (*HEADERS, ".cpp"))


def _compiled(name: str, arguments: Sequence[str], folders: tuple[Path, ...]) -> Path:
    """The file that the compiler makes with these arguments, from the cache when they and the folders are as before."""
    content = "\n".join([_compiler(), _hash(folders), *COMPILE, *arguments])
    path = CACHE / f"{hashlib.sha256(content.encode()).hexdigest()[:24]}-{name}"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        # One process compiles it, and other processes that need it wait.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return path if path.exists() else _compile(path, arguments)


def _compile(path: Path, arguments: Sequence[str]) -> Path:
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        made = Path(folder) / path.name
        done = subprocess.run([*COMPILE, *arguments, "-o", str(made)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{path.name} does not compile:\n{done.stderr}"
        return made.replace(path)


def build(name: str, source: Path, declaration: str = "", include_folders: tuple[Path, ...] = KERNEL_FOLDERS) -> Path:
    """The library of one source file and the emulator."""
    machine = _compiled("machine.o", [*MACHINE_OPTIONS, *(str(SOURCES / file) for file in MACHINE)], (SOURCES,))
    # Reading the headers takes a third of the time, so it is done once. -include finds them by a name without .gch.
    header = ["-x", "c++-header", *KERNEL_OPTIONS, str(SOURCES / "intrinsics.hpp")]
    precompiled = _compiled("intrinsics.hpp.gch", header, (SOURCES,))
    declared = _declared(declaration)
    includes = [f"-I{folder}" for folder in (SOURCES, *include_folders)]
    arguments = ["-shared", *KERNEL_OPTIONS, "-include", str(precompiled.with_suffix("")), "-include", str(declared)]
    arguments += ['-DFA_INTRINSICS_HEADER="intrinsics.hpp"', *includes]
    return _compiled(f"{name}.so", [*arguments, str(source), str(machine)], (HERE, *include_folders))


def _declared(declaration: str) -> Path:
    """A header of the cache with these compile-time parameters."""
    path = CACHE / f"{hashlib.sha256(declaration.encode()).hexdigest()[:24]}.h"
    if not path.exists():
        files.write_atomically(path, declaration.encode())
    return path


def build_variant(variant: Variant) -> Path:
    """The library of one variant of a kernel, which has all of its entries."""
    return build(
        variant.name, SOURCES / variant.source.replace(".cuh", ".cpp"), variant.declaration, variant.include_folders
    )


@functools.cache
def _library(variant: Variant) -> ctypes.CDLL:
    return ctypes.CDLL(str(build_variant(variant)))


_shuffle = 0


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """Launches run CTAs, and warps within each, in an order by the seed, because a GPU guarantees none."""
    global _shuffle
    _shuffle, before = seed, _shuffle
    try:
        yield
    finally:
        _shuffle = before


def launch(step: KernelLaunch, params: Params, ranges: Sequence[Range]) -> Report:
    """Runs one kernel. Raises EmulatorError when it does something forbidden."""
    entry = step.variant.entries[step.entry]
    emulate = getattr(_library(step.variant), entry.name.replace("fastattention_", "emulate_"))
    grid = Grid(step.num_ctas, 0, entry.num_warps, entry.shared_bytes)
    return checked(emulate, f"{entry.name} of {step.variant.name}", params, grid, ranges)


def checked(
    emulate: Callable[..., int], name: str, params: ctypes.Structure, grid: Grid, ranges: Sequence[Range]
) -> Report:
    """Calls a library's function. Raises EmulatorError, with the name of the kernel, when it failed."""
    report = Report()
    array = (Range * len(ranges))(*ranges)
    grid.shuffle, num_ranges = _shuffle, ctypes.c_int64(len(ranges))
    if emulate(ctypes.byref(params), ctypes.byref(grid), array, num_ranges, ctypes.byref(report)) != 0:
        raise EmulatorError(f"{name}: {report.error.decode()}")
    return report


def ranges_of(params: Params, problem: Problem, num_slots: int) -> list[Range]:
    """The memory that attention may access in vectors, from the first to the last element of the call."""
    if not isinstance(params, AttentionParams):
        return []
    varlen, batch = problem.layout is Layout.VARLEN, problem.batch_size
    tokens_q = _int32s(params.cu_seqlens_q, batch + 1)[-1] if varlen else problem.seqlen_q
    rows_out = problem.total_q if varlen else problem.seqlen_q
    ranges = [
        _range(params, "q", 0, 1 if varlen else batch, tokens_q, problem.nheads, params.headdim),
        _range(params, "out", 0, 1 if varlen else batch, rows_out, problem.nheads, params.headdim_v),
        Range(params.partial_out or 0, 4 * num_slots * params.partial_rows * params.headdim_v),
        Range(params.partial_stats or 0, 8 * num_slots * params.partial_rows),
    ]
    if params.attn_bias:
        sizes = {"batch": batch, "head": problem.nheads, "row": tokens_q, "key": problem.seqlen_k}
        last = sum((size - 1) * getattr(params, f"bias_stride_{axis}") for axis, size in sizes.items())
        ranges.append(Range(params.attn_bias, (4 if params.bias_is_float else 2) * (last + 1)))
    item = 1 if problem.cache_dtype is not None else 2
    for name, columns in (("k", params.headdim), ("v", params.headdim_v)):
        for block, tokens in _blocks(params, problem):
            ranges.append(_range(params, name, block, 1, tokens, problem.nheads_k, columns, item))
    return [part for part in ranges if part.bytes > 0]


def ranges_of_backward(params: Params, problem: Problem, variant: Variant) -> list[Range]:
    """The memory that a backward may access: the tensors of the call, grad_out, sums, and contiguous gradients."""
    call = params.call
    ranges = ranges_of(call, problem, 0)
    tokens_q = problem.total_q if problem.layout is Layout.VARLEN else problem.batch_size * problem.seqlen_q
    tokens_k = problem.batch_size * problem.seqlen_k
    if problem.layout is Layout.VARLEN:
        tokens_k = _int32s(call.cu_seqlens_k, problem.batch_size + 1)[-1]
    for address, tokens, heads, columns in (
        (params.grad_out, tokens_q, problem.nheads, call.headdim_v),
        (params.grad_q, tokens_q, problem.nheads, call.headdim),
        (params.grad_k, tokens_k, problem.nheads_k, call.headdim),
        (params.grad_v, tokens_k, problem.nheads_k, call.headdim_v),
    ):
        if address:
            ranges.append(Range(address, 2 * tokens * heads * columns))
    if isinstance(variant, BackwardConfig) and variant.sums_queries:
        ranges.append(Range(params.query_sums, 4 * math.prod(query_sums_shape(problem, variant))))
    return ranges


def ranges_of_quantize(params: Params, problem: Problem) -> list[Range]:
    """The memory that the quantization of queries and keys may access: both, and their bytes."""
    varlen, batches = problem.layout is Layout.VARLEN, 1 if problem.layout is Layout.VARLEN else problem.batch_size
    ranges = []
    for name, seqlen, heads in (("q", problem.seqlen_q, problem.nheads), ("k", problem.seqlen_k, problem.nheads_k)):
        tokens = _int32s(getattr(params, f"cu_seqlens_{name}"), problem.batch_size + 1)[-1] if varlen else seqlen
        ranges.append(_range(params, name, 0, batches, tokens, heads, params.headdim))
        ranges.append(Range(getattr(params, f"{name}_stored") or 0, batches * tokens * heads * params.columns))
    return [part for part in ranges if part.bytes > 0]


def ranges_of_merge(params: Params, item: int, out_item: int) -> list[Range]:
    """The memory that a merge may access: that of parts and out, in elements of `item` and `out_item` bytes."""
    assert isinstance(params, MergeParams)
    ranges = []
    sizes = (params.batch_size, params.tokens, params.nheads, params.headdim_v)
    for part in range(params.num_parts):
        strides = (params.outs_stride_batch, params.outs_stride_row, params.outs_stride_head)
        last = sum((size - 1) * stride[part] for size, stride in zip(sizes[:3], strides, strict=True))
        ranges.append(Range(params.outs[part] or 0, item * (last + params.headdim_v)))
    return [*ranges, Range(params.out or 0, out_item * math.prod(sizes))]


def _int32s(address: int, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(address)) if count else []


def _blocks(params: Params, problem: Problem) -> list[tuple[int, int]]:
    """Pages or rows of the batch that hold keys of the call, and up to which token in each."""
    batch = problem.batch_size
    if problem.layout is Layout.DENSE:
        return [(i, problem.seqlen_k) for i in range(batch)]
    if problem.layout is Layout.VARLEN:
        offsets = _int32s(params.cu_seqlens_k, batch + 1)
        if not params.block_table:
            return [(0, offsets[-1])]
        lengths = [offsets[i + 1] - offsets[i] for i in range(batch)]
    else:
        lengths = [length + problem.seqlen_new for length in _int32s(params.cache_seqlens, batch)]
    if params.block_table:
        return [(page, params.page_block_size) for page in _pages(params, lengths)]
    rows = _int32s(params.cache_batch_idx, batch) if params.cache_batch_idx else list(range(batch))
    return list(zip(rows, lengths, strict=True))


def _pages(params: Params, lengths: Sequence[int]) -> list[int]:
    """Every page that a sequence of one of these lengths uses."""
    pages: set[int] = set()
    for i, length in enumerate(lengths):
        used = -(-length // params.page_block_size)
        row = params.block_table + 4 * i * params.block_table_stride
        pages.update((ctypes.c_int32 * used).from_address(row))
    return sorted(pages)


def _range(
    params: Params, name: str, block: int, batches: int, tokens: int, heads: int, columns: int, item: int = 2
) -> Range:
    """The memory of one tensor from a page, or a row of the batch, on."""
    stride_batch, stride_row, stride_head = (
        getattr(params, f"{name}_stride_{axis}") for axis in ("batch", "row", "head")
    )
    if min(batches, tokens, heads) == 0:
        return Range(0, 0)
    last = (batches - 1) * stride_batch + (tokens - 1) * stride_row + (heads - 1) * stride_head
    return Range(getattr(params, name) + item * block * stride_batch, item * (last + columns))


class EmulatedCudaBackend(CudaBackend):
    """The cuda backend on tensors of the processor, as if on one chip."""

    limits: ClassVar[Limits]
    reports: list[Report]  # one for each launch of the last call, or merge
    counters: Tensor
    scratch: Scratch  # scratch memory of the last decode
    newest: Launches

    def why_unavailable(self) -> str | None:
        return None

    def describe(self) -> str:
        return f"emulated, compute capability {self.limits.target / 10:.1f}"

    def _why_not_device(self, problem: Problem | MergeProblem) -> str | None:
        return None if problem.device.type == "cpu" else f"tensors are on {problem.device}; the emulator takes cpu"

    def _limits(self, problem: Problem | MergeProblem) -> Limits:
        return self.limits

    def _launches(self, problem: Problem, values_in_keys: bool = False) -> Launches:
        self.newest = super()._launches(problem, values_in_keys)
        return self.newest

    def _launcher(self, launch: KernelLaunch, problem: Problem | MergeProblem) -> Callable[[Params], None]:
        split = self.newest.split if isinstance(problem, Problem) else None
        return lambda params: self._emulate(launch, params, problem, split.num_slots if split else 0)

    def _emulate(self, step: KernelLaunch, params: Params, problem: Problem | MergeProblem, num_slots: int) -> None:
        if isinstance(params, BackwardParams):
            ranges = ranges_of_backward(params, problem, step.variant)
        elif isinstance(params, QuantizeParams):
            assert isinstance(problem, Problem)
            ranges = ranges_of_quantize(params, problem)
        elif isinstance(step.variant, MergeConfig):
            ranges = ranges_of_merge(params, step.variant.parts_dtype.itemsize, step.variant.out_dtype.itemsize)
        else:
            assert isinstance(problem, Problem)
            ranges = ranges_of(params, problem, num_slots)
        self.reports.append(launch(step, params, ranges))

    def _scratch(self, problem: Problem) -> Callable[[int, int], Scratch]:
        def take(num_counters: int, num_floats: int) -> Scratch:
            self.counters = torch.zeros(num_counters, dtype=torch.int32)
            self.scratch = Scratch(self.counters, torch.full((num_floats,), math.nan))
            return self.scratch

        return take

    def merge(self, problem: MergeProblem, outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        self.reports = []
        return super().merge(problem, outs, lses)

    def make_call(self, problem: Problem, inputs: Inputs) -> Callable[[Inputs], AttentionOutput]:
        return functools.partial(self.forward, problem)

    def forward(self, problem: Problem, inputs: Inputs) -> AttentionOutput:
        self.reports, self.counters = [], torch.zeros(0, dtype=torch.int32)
        result = super().forward(problem, inputs)
        assert not self.counters.any(), "kernels leave counters at zero"
        return result


# Fewer multiprocessors than any GPU has: then CTAs of a decode have many tiles, and those of several sequences.
NUM_SMS = 5


class EmulatedSm60(EmulatedCudaBackend):
    name, limits = "cuda-sm60", CHIPS["P100"]._replace(num_sms=NUM_SMS)


class EmulatedSm70(EmulatedCudaBackend):
    name, limits = "cuda-sm70", CHIPS["V100"]._replace(num_sms=NUM_SMS)


class EmulatedSm75(EmulatedCudaBackend):
    name, limits = "cuda-sm75", CHIPS["T4"]._replace(num_sms=NUM_SMS)


class EmulatedSm80(EmulatedCudaBackend):
    name, limits = "cuda-sm80", CHIPS["A100"]._replace(num_sms=NUM_SMS)


class EmulatedSingleSm80(EmulatedCudaBackend):
    """A chip with one multiprocessor, for which caches of moderate size have many keys."""

    name, limits = "cuda-sm80-single", CHIPS["A100"]._replace(num_sms=1)


EMULATED = (EmulatedSm60, EmulatedSm70, EmulatedSm75, EmulatedSm80)


def path_of(variant: Variant) -> Variant:
    """A kernel without its rules of scores, which are the same code in every tile: tests of tiles need one of them."""
    if not isinstance(variant, AttentionConfig):
        return variant
    return dataclasses.replace(variant, softcaps=False, has_alibi=False, has_bias=False)
