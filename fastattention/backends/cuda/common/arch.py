"""Facts of the code paths that kernels are compiled for, and the folders of headers that families share."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

COMMON_FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", Path(__file__).parents[2] / "common")

# Constants that shared headers read, for a kernel that multiplies tiles of 16-bit elements without a cache.
PLAIN_TILES = {
    "quantized": False, "cache_is_int8": False, "int8_products": False, "queries_in_registers": False,
    "values_in_keys": False, "swizzled": False, "column_warps": 1,
}  # fmt: skip

MAX_REGISTERS = 255  # registers of a thread, on every GPU


class ArchFacts(NamedTuple):
    """Facts that kernels/arch/sm*.cuh assert."""

    step_rows: int  # query rows that a warp's matrix instruction takes
    elements: int  # floats that a lane holds of step_rows x 8 accumulators
    shared_bytes: int  # bytes of an element in shared memory


ARCH_FACTS = {
    60: ArchFacts(16, 4, 4),
    70: ArchFacts(32, 8, 2),
    75: ArchFacts(16, 4, 2),
    80: ArchFacts(16, 4, 2),
}
