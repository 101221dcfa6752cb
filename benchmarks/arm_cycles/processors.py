"""The processors whose models count cycles, and chips that have them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Processor:
    """A processor as llvm-mca calls it, and the clock of a chip that has it."""

    name: str
    chip: str
    ghz: float
    isa: str  # that of ours which is chosen there
    product_reach: float | None  # least share of its peak that products are to have; None where we promise none


PROCESSORS = (
    Processor("tsv110", "Kunpeng 920", 2.6, "neon_fp16", 0.75),
    Processor("neoverse-n1", "Graviton2", 2.5, "neon", None),
    Processor("neoverse-v1", "Graviton3", 2.6, "neon_bf16", 0.8),
    Processor("neoverse-v2", "Graviton4", 2.8, "neon_bf16", 0.8),
)
PORTABLE = "portable"  # the header without intrinsics, which every processor runs
