"""The peak rates of the processor, measured by loops of the native library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

import fastattention
from fastattention.attention.backend import ATTENTION_BACKENDS
from fastattention.backends.cpu.library import load_library, measure_peaks
from fastattention.cli.bench.workload import Limit

NAMES: dict[Limit, str] = {"fma": "FMA peak", "bf16_dot": "bf16 dot peak", "dram_read": "DRAM read"}


@dataclass(frozen=True)
class PeakRates:
    """Measured peaks over all threads, in 10^9 a second; None where the processor or the library cannot say."""

    fma: float | None = None  # float32 operations
    bf16_dot: float | None = None  # bfloat16 operations
    dram_read: float | None = None  # bytes
    reason: str | None = None  # why nothing was measured


# Sizes of loops that take turns with what they limit: long enough to be timed, short beside the measured calls.
_LOOP_ITERATIONS = 4_000_000
_LOOP_BYTES = 1 << 29


def limit_loop(limit: Limit) -> Callable[[], float] | None:
    """A loop at the limit, over all threads, that returns the operations or bytes it did; None where there is none."""
    if ATTENTION_BACKENDS.get("cpu").why_unavailable() is not None:
        return None
    library, num_threads = load_library(), fastattention.get_num_threads()
    if limit == "dram_read":
        return lambda: library.read_loop(_bytes_to_read(), num_threads)
    kind = {"fma": 0, "bf16_dot": 1}[limit]
    if library.flop_loop(kind, 1, 1) == 0.0:
        return None
    return lambda: library.flop_loop(kind, _LOOP_ITERATIONS, num_threads)


@functools.cache
def _bytes_to_read() -> torch.Tensor:
    return torch.ones(_LOOP_BYTES, dtype=torch.uint8, device="cpu")


def measure_limits() -> PeakRates:
    """Run the loops, a second or so."""
    reason = ATTENTION_BACKENDS.get("cpu").why_unavailable()
    if reason is not None:
        return PeakRates(reason=f"the peaks are measured by the cpu backend: {reason}")
    peaks = measure_peaks(fastattention.get_num_threads())
    return PeakRates(peaks.fma_gflops, peaks.bf16_dot_gflops, peaks.read_gbytes_per_s)
