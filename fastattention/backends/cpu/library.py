"""Finds the native library, loads it with ctypes, and calls its C interface (kernels/api.cpp)."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import fastattention.backends.cpu
from fastattention import environment
from fastattention.backends.common.c_struct import Params
from fastattention.backends.cpu.headers import STRUCTS
from fastattention.backends.cpu.torch_threads import OpenMp, find_openmp
from fastattention.errors import ArgumentError, LibraryError

_FILE_NAME = "libfastattention_cpu.so"
_ABI_VERSION = 15  # as in api.cpp


class Peaks(NamedTuple):
    """Measured limits of this machine, over all threads used."""

    num_threads: int
    fma_gflops: float  # float32 fused multiply-add, two operations each
    bf16_dot_gflops: float | None  # bfloat16 dot products; None without the instruction
    read_gbytes_per_s: float  # sequential reads of memory far larger than the caches


class Library:
    """The loaded library and the instruction set chosen from those this processor runs."""

    def __init__(self, path: Path) -> None:
        """Raises LibraryError when the library at `path` is missing, damaged or of another version."""
        self.path = path
        try:
            self._functions = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise LibraryError(f"cannot load {path}: {error}; reinstall fastattention") from error
        self._check_version()
        self.isas: list[str] = [
            self._functions.fastattention_isa_name(index).decode()
            for index in range(self._functions.fastattention_num_isas())
        ]
        self._isa_index = self._chosen_isa()
        # Runs a call of attention. Takes the address of its FaAttentionParams, its packed pointers and the number of
        # threads. Returns 0, or 1 when working memory runs out.
        self.forward: Callable[[int, bytes, int], int] = functools.partial(
            self._functions.fastattention_forward, self._isa_index
        )

        # Computes gradients. Takes the same arguments, and the address of an FaGradients before the number of threads.
        self.backward: Callable[[int, bytes, int, int], int] = functools.partial(
            self._functions.fastattention_backward, self._isa_index
        )

        # Runs a call of linear attention. Takes the arguments of `forward`, with FaLinearParams.
        self.linear: Callable[[int, bytes, int], int] = functools.partial(
            self._functions.fastattention_linear, self._isa_index
        )

        # Computes its gradients. Takes the address of an FaLinearGradients before the number of threads.
        self.linear_backward: Callable[[int, bytes, int, int], int] = functools.partial(
            self._functions.fastattention_linear_backward, self._isa_index
        )

        # Runs a causal convolution, or computes its gradients. Takes the arguments of `forward` and `backward`, with
        # FaConvolutionParams and FaConvolutionGradients.
        self.convolution: Callable[[int, bytes, int], int] = functools.partial(
            self._functions.fastattention_convolution, self._isa_index
        )
        self.convolution_backward: Callable[[int, bytes, int, int], int] = functools.partial(
            self._functions.fastattention_convolution_backward, self._isa_index
        )

        # Finds the keys of the greatest index scores. Takes the arguments of `forward`, with FaIndexerParams.
        self.indexer: Callable[[int, bytes, int], int] = functools.partial(
            self._functions.fastattention_indexer, self._isa_index
        )

        # Finds the slots of selected keys. Takes the arguments of `forward`, with FaSelectionParams. Returns -1, or the
        # place of the first index that is no block of its sequence.
        self.select_slots: Callable[[int, bytes, int], int] = self._functions.fastattention_select_slots

    def _check_version(self) -> None:
        abi = self._functions.fastattention_abi_version()
        found = {name: self._functions.fastattention_sizeof(name.encode()) for name in STRUCTS}
        expected = {name: ctypes.sizeof(params) for name, params in STRUCTS.items()}
        if abi != _ABI_VERSION or found != expected:
            raise LibraryError(
                f"{self.path} is of another version (interface {abi}, sizes {found}; expected {_ABI_VERSION} "
                f"and {expected}); reinstall fastattention"
            )

    def _declare(self) -> None:
        int64 = ctypes.c_int64
        declarations: dict[str, tuple[type | None, Sequence[type]]] = {
            "fastattention_abi_version": (int64, ()),
            "fastattention_sizeof": (int64, (ctypes.c_char_p,)),
            "fastattention_num_isas": (int64, ()),
            "fastattention_isa_name": (ctypes.c_char_p, (int64,)),
            "fastattention_multiplies_int8": (int64, (int64,)),
            "fastattention_forward": (int64, (int64, ctypes.c_void_p, ctypes.c_char_p, int64)),
            "fastattention_backward": (int64, (int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, int64)),
            "fastattention_linear": (int64, (int64, ctypes.c_void_p, ctypes.c_char_p, int64)),
            "fastattention_linear_backward": (int64, (int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, int64)),
            "fastattention_convolution": (int64, (int64, ctypes.c_void_p, ctypes.c_char_p, int64)),
            "fastattention_convolution_backward": (
                int64,
                (int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, int64),
            ),
            "fastattention_indexer": (int64, (int64, ctypes.c_void_p, ctypes.c_char_p, int64)),
            "fastattention_select_slots": (int64, (ctypes.c_void_p, ctypes.c_char_p, int64)),
            "fastattention_prepare": (ctypes.c_void_p, (int64, ctypes.c_void_p)),
            "fastattention_run": (None, (ctypes.c_void_p,)),
            "fastattention_failed": (int64, (ctypes.c_void_p,)),
            "fastattention_release": (None, (ctypes.c_void_p,)),
            "fastattention_queue_start": (ctypes.c_void_p, (ctypes.c_void_p,) * 2),
            "fastattention_queue_push": (int64, (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p)),
            "fastattention_queue_newest": (ctypes.c_uint32, (ctypes.c_void_p,)),
            "fastattention_queue_end": (None, (ctypes.c_void_p,)),
            "fastattention_set_omp_team": (None, (ctypes.c_void_p,) * 2),
            "fastattention_flop_loop": (ctypes.c_double, (int64,) * 4),
            "fastattention_read_loop": (None, (int64, ctypes.c_void_p, int64, int64)),
            "fastattention_classify_tile": (int64, (int64,) * 8),
        }
        for name, (result, arguments) in declarations.items():
            function = getattr(self._functions, name)
            function.restype, function.argtypes = result, list(arguments)

    def _chosen_isa(self) -> int:
        if not self.isas:
            raise LibraryError("the library was built for none of the instruction sets of this processor")
        wanted = environment.cpu_isa()
        if wanted is None:
            return len(self.isas) - 1
        if wanted not in self.isas:
            raise LibraryError(
                f"FASTATTENTION_CPU_ISA={wanted!r} is not available here; choose from {', '.join(self.isas)}"
            )
        return self.isas.index(wanted)

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        return self.isas[self._isa_index]

    @property
    def multiplies_int8(self) -> bool:
        """Whether this processor multiplies int8 with the instruction set in use."""
        return bool(self._functions.fastattention_multiplies_int8(self._isa_index))

    def prepare(self, params: Params) -> int:
        """Copies a call of attention, to be run later; gives a handle for `release`. Raises MemoryError."""
        handle = self._functions.fastattention_prepare(self._isa_index, ctypes.addressof(params))
        if not handle:
            raise MemoryError("fastattention could not get memory for a prepared call")
        return int(handle)

    @property
    def run_address(self) -> int:
        """Address of the C function `void (void*)` that runs a prepared call, given its handle, on any thread."""
        return int(ctypes.cast(self._functions.fastattention_run, ctypes.c_void_p).value or 0)

    def run(self, handle: int) -> None:
        """Runs a prepared call in this thread."""
        self._functions.fastattention_run(handle)

    def failed(self, handle: int) -> bool:
        """Whether working memory ran out when a prepared call was run; all of its results are NaN then."""
        return bool(self._functions.fastattention_failed(handle))

    def release(self, handle: int) -> None:
        """Frees a prepared call, which must not be run again."""
        self._functions.fastattention_release(handle)

    def start_queue(self, ready: int, done: int) -> int:
        """Starts a WorkQueue on the counters at these addresses; gives a handle. Raises MemoryError."""
        handle = self._functions.fastattention_queue_start(ready, done)
        if not handle:
            raise MemoryError("fastattention could not start a thread that works for a GPU")
        return int(handle)

    def push(self, queue: int, number: int, function: int, argument: int) -> None:
        """Queues the C function `void (void*)` at `function` for when `ready` is `number`. Raises MemoryError."""
        if self._functions.fastattention_queue_push(queue, number, function, argument) != 0:
            raise MemoryError("fastattention could not get memory for a job of the CPU")

    def newest(self, queue: int) -> int:
        """The number of the newest job, 0 when there was none."""
        return int(self._functions.fastattention_queue_newest(queue))

    def end_queue(self, queue: int) -> None:
        """Ends a queue: waits for the running job and drops the others, which count as done."""
        self._functions.fastattention_queue_end(queue)

    def set_omp_team(self, openmp: OpenMp) -> None:
        """Sets the OpenMP team whose threads work, while they are awake, instead of the library's own."""
        self._functions.fastattention_set_omp_team(*openmp)

    def flop_loop(self, kind: int, iterations: int, num_threads: int) -> float:
        """Runs multiply-adds (kind 0) or bfloat16 dots (kind 1) on all threads; returns the operations done."""
        return float(self._functions.fastattention_flop_loop(self._isa_index, kind, iterations, num_threads))

    def read_loop(self, data: torch.Tensor, num_threads: int) -> float:
        """Reads all of a uint8 tensor once; returns its bytes."""
        self._functions.fastattention_read_loop(self._isa_index, data.data_ptr(), data.numel(), num_threads)
        return float(data.numel())

    def classify_tile(self, *arguments: int) -> int:
        """TileRange::classify of tile_range.hpp: seqlen_q, seqlen_k, left, right, first_q, last_q, first_k, last_k."""
        return int(self._functions.fastattention_classify_tile(*arguments))


def find_library() -> Path:
    """FASTATTENTION_CPU_LIBRARY, else the library of this installation. Raises LibraryError when there is none."""
    override = environment.cpu_library()
    if override is not None:
        return Path(override)
    for folder in fastattention.backends.cpu.__path__:
        if (path := Path(folder) / _FILE_NAME).exists():
            return path
    raise LibraryError(f"{_FILE_NAME} is not installed; run `pip install .` in the source tree, with a C++ compiler")


@functools.cache
def load_library() -> Library:
    """The library, loaded once, with the threads of torch. Raises LibraryError."""
    library = Library(find_library())
    library.set_omp_team(find_openmp())
    return library


def why_unavailable() -> str | None:
    """Why the library cannot be loaded, or None."""
    try:
        load_library()
    except LibraryError as error:
        return str(error)
    return None


def available_isas() -> list[str]:
    """Instruction sets that the library was built for and this processor runs, slowest first. Raises LibraryError."""
    return list(load_library().isas)


def measure_peaks(num_threads: int) -> Peaks:
    """Measures the limits of this machine with `num_threads` threads; takes a few seconds and 1 GiB of memory."""
    if num_threads < 1:
        raise ArgumentError(f"num_threads={num_threads} must be at least 1")
    library = load_library()
    data = torch.ones(1 << 30, dtype=torch.uint8, device="cpu")
    has_dot = library.flop_loop(1, 1, 1) > 0.0
    return Peaks(
        num_threads,
        _rate(lambda: library.flop_loop(0, 8_000_000, num_threads)),
        _rate(lambda: library.flop_loop(1, 8_000_000, num_threads)) if has_dot else None,
        _rate(lambda: library.read_loop(data, num_threads)),
    )


def _rate(work: Callable[[], float]) -> float:
    """Median rate of five runs of `work`, which returns how much it did, in 1e9 a second."""
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        amount = work()
        rates.append(amount / (time.perf_counter() - start) / 1e9)
    return float(median(rates))
