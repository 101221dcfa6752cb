"""What the processor can do at most, measured by loops of the native library."""

from __future__ import annotations

from dataclasses import dataclass

import fastattention
from fastattention.backends.cpu.library import measure_peaks
from fastattention.backends.registry import get_backend
from fastattention.cli.bench.workload import Limit

NAMES: dict[Limit, str] = {"fma": "FMA peak", "bf16_dot": "bf16 dot peak", "dram_read": "DRAM read"}


@dataclass(frozen=True)
class Limits:
    """Measured peaks over all threads, in 10^9 a second; None where the processor or the library cannot say."""

    fma: float | None = None  # float32 operations
    bf16_dot: float | None = None  # bfloat16 operations
    dram_read: float | None = None  # bytes
    reason: str | None = None  # why nothing was measured


def measure_limits() -> Limits:
    """Run the loops, a second or so."""
    reason = get_backend("cpu").why_unavailable()
    if reason is not None:
        return Limits(reason=f"the peaks are measured by the cpu backend: {reason}")
    peaks = measure_peaks(fastattention.get_num_threads())
    return Limits(peaks.fma_gflops, peaks.bf16_dot_gflops, peaks.read_gbytes_per_s)
