"""Speeds of PyTorch's CUTLASS kernel that others have measured on V100s: what the model is judged on.

docs/volta.md says where they were published. Neither the clock nor the module, SXM2 or PCIe, was told with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from .launch import Problem


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    problem: Problem
    tflops: float  # useful


FIGURES = (
    Figure(Problem(seqlen=1024, batch_size=1, nheads=16, headdim=64, causal=False), 22.2),
    Figure(Problem(seqlen=2048, batch_size=1, nheads=16, headdim=64, causal=False), 29.4),
    Figure(Problem(seqlen=4096, batch_size=1, nheads=16, headdim=64, causal=False), 32.4),
    Figure(Problem(seqlen=4096, batch_size=1, nheads=16, headdim=64, causal=True), 29.2),
    Figure(Problem(seqlen=2048, batch_size=1, nheads=8, headdim=128, causal=False), 32.6),
    Figure(Problem(seqlen=4096, batch_size=1, nheads=8, headdim=128, causal=False), 37.0),
)
