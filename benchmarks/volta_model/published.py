"""Speeds of PyTorch's CUTLASS kernel that others have measured on V100s: what the model is judged on.

Their clock, module (SXM2 or PCIe) and version of the library are unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

from .launch import Problem

_SOURCE = "PyTorch/xformers CUTLASS kernel on a V100, published by others; library version, module and clock not told"


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    problem: Problem
    tflops: float  # useful
    source: str


FIGURES = (
    Figure(Problem(seqlen=1024, batch_size=1, nheads=16, headdim=64, causal=False), 22.2, _SOURCE),
    Figure(Problem(seqlen=2048, batch_size=1, nheads=16, headdim=64, causal=False), 29.4, _SOURCE),
    Figure(Problem(seqlen=4096, batch_size=1, nheads=16, headdim=64, causal=False), 32.4, _SOURCE),
    Figure(Problem(seqlen=4096, batch_size=1, nheads=16, headdim=64, causal=True), 29.2, _SOURCE),
    Figure(Problem(seqlen=2048, batch_size=1, nheads=8, headdim=128, causal=False), 32.6, _SOURCE),
    Figure(Problem(seqlen=4096, batch_size=1, nheads=8, headdim=128, causal=False), 37.0, _SOURCE),
)
