"""Hardware figures of the Ascend 910B (buffers, units, bandwidths), each with its source.

Sources, by the letter that stands behind a figure:

    P  the platform descriptions (Ascend910B*.ini) that come with CANN: cores, clocks, capacities, rates of paths
    C  the capacity that Triton-Ascend leaves to a kernel, told by its own messages on overflow
    G  the vendor's guide to operators in Ascend C, on tiling for the L2 cache
    V  the vendor's published figures of the products: peak rates, memory bandwidth
    R  rates behind published cycle counts of attention on a 910B2 (simulator/calibration.py)
    ?  a guess; what depends on it is said beside it

An AI Core is one Cube unit (matrix products) and two Vector units (all else). They meet nowhere but in global memory,
or in the L2 cache that stands for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from fastattention.errors import ArgumentError

KIB = 1024


class _Sku(NamedTuple):
    """What differs between the chips of the family."""

    num_cores: int
    clock_ghz: float
    hbm_terabytes_per_second: float


@dataclass(frozen=True)
class Chip:
    """One 910B. Capacities are in bytes, rates in bytes or elements a cycle of the core's clock."""

    name: str
    num_cores: int  # P: AI Cores
    clock_ghz: float  # P
    hbm_bytes_per_second: float  # V: 1.6 to 1.8 TB/s are published, the lower is taken; B4 has half

    # Buffers of a core.
    ub_bytes: int = 192 * KIB - 8 * KIB - 256  # P, C: of each Vector unit, less what the compiler keeps for itself
    l1_bytes: int = 512 * KIB  # P
    l0a_bytes: int = 64 * KIB  # P: left operands of the Cube
    l0b_bytes: int = 64 * KIB  # P: right operands
    l0c_bytes: int = 128 * KIB  # P: float32 results
    l2_bytes: int = 192 * KIB * KIB  # P: of the whole chip

    # Paths of a core.
    l2_read_rate: float = 110.0  # P: from the L2 cache, by the Cube and the Vector units together
    l2_write_rate: float = 86.0  # P: into it; likewise
    l2_bytes_per_second: float = 7e12  # G: all cores together, reads and writes; the same is assumed for every chip
    hbm_rate: float = 32.0  # P: one core from memory, when the cores together do not exceed the chip's
    l1_to_l0a_rate: float = 256.0  # R: as published with the cycle counts; P has 512
    l1_to_l0b_rate: float = 128.0  # R: likewise; P has 256

    # Units of a core.
    cube_m: int = 16  # P: a cycle multiplies 16 x 16 by 16 x 16 in float16 and bfloat16
    cube_n: int = 16
    cube_k: int = 16
    float32_slowdown: int = 4  # V: the Cube in float32
    vector_rate: float = 64.0  # P: float32 elements of an addition, product, maximum or conversion a cycle and Vector
    special_rate: float = 32.0  # R: of an exponential, logarithm or quotient
    vectors_per_core: int = 2  # P

    @property
    def peak_tflops(self) -> float:
        """Of the Cubes, in float16 and bfloat16."""
        return self.num_cores * self.clock_ghz * 2e-3 * self.cube_m * self.cube_n * self.cube_k

    @property
    def clock_hz(self) -> float:
        """Cycles a second."""
        return self.clock_ghz * 1e9

    def memory_rate(self, active_cores: int) -> float:
        """Bytes a cycle that a core gets of memory when so many ask at once."""
        return min(self.hbm_rate, self.hbm_bytes_per_second / (self.clock_hz * active_cores))


_SKUS = {
    "910B1": _Sku(24, 1.85, 1.6),
    "910B2": _Sku(24, 1.80, 1.6),
    "910B3": _Sku(20, 1.80, 1.6),
    "910B4": _Sku(20, 1.50, 0.8),
}
CHIPS: dict[str, Chip] = {
    name: Chip(name, sku.num_cores, sku.clock_ghz, sku.hbm_terabytes_per_second * 1e12) for name, sku in _SKUS.items()
}


def find_chip(name: str) -> Chip:
    """The chip that a device calls itself: "910B2", "Ascend910B2", "Ascend910B2C". Raises ArgumentError for others."""
    found = re.fullmatch(r"(?:ascend[ _-]?)?(910B\d)(?:[A-Z]|-\d)?", name.strip(), re.IGNORECASE)
    chip = CHIPS.get(found[1].upper()) if found else None
    if chip is None:
        raise ArgumentError(f"chip={name!r} is not known; choose from {', '.join(CHIPS)}")
    return chip
