"""Hardware figures of the Ascend 910B and 910C (buffers, units, bandwidths), each with its source.

Sources, by the letter in the comment of a figure:

    P  the platform descriptions (Ascend910B1.ini, Ascend910_9392.ini, ...) in CANN's public runtime: cores, clocks,
       capacities, rates of paths
    C  the capacity that Triton-Ascend leaves to a kernel, as its messages on overflow say
    G  the vendor's guide to operators in Ascend C, on tiling for the L2 cache
    V  the vendor's published figures of the products: peak rates, memory bandwidth
    R  rates derived from published cycle counts of attention on a 910B2 (simulator/calibration.py)
    ?  a guess; the comment says what depends on it

An AI Core is one Cube unit (matrix products) and two Vector units (all else). They exchange data only through global
memory, or through the L2 cache in front of it.

A 910C, the chip of the A3 series, is two dies of the 910B's kind in one package. Each has its own memory and L2 cache,
and is an NPU of its own to torch_npu. So a call runs on one die, and "chip" means a die here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fastattention.errors import ArgumentError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Chip:
    """A 910B, or a die of a 910C. Capacities are in bytes, rates in bytes or elements a cycle of the core's clock."""

    name: str
    num_cores: int  # P: AI Cores
    clock_ghz: float  # P
    l2_bytes: int  # P: shared by all cores
    # V: 1.6 to 1.8 TB/s are published of a 910B. The lower is taken, and half of it for a B4. A 910C has 3.2 TB/s.
    # ?: dies with fewer cores have as much as others, and a B4-1 as much as a B4.
    hbm_bytes_per_second: float
    dies: int = 1  # V: dies of the package, each of them such a chip

    # Buffers of a core.
    ub_bytes: int = 192 * KIB - 8 * KIB - 256  # P, C: each Vector unit's, less what the compiler keeps for itself
    l1_bytes: int = 512 * KIB  # P
    l0a_bytes: int = 64 * KIB  # P: left operands of the Cube
    l0b_bytes: int = 64 * KIB  # P: right operands
    l0c_bytes: int = 128 * KIB  # P: float32 results

    # Paths of a core.
    l2_read_rate: float = 110.0  # P: from the L2 cache, by the Cube and the Vector units together
    l2_write_rate: float = 86.0  # P: into it, by both together
    l2_bytes_per_second: float = 7e12  # G: all cores together, reads and writes; the same is assumed for every chip
    hbm_rate: float = 32.0  # P: one core from memory, when the cores together do not exceed the chip's
    l1_to_l0a_rate: float = 256.0  # R: as published with the cycle counts; P has 512
    l1_to_l0b_rate: float = 128.0  # R: as published with the cycle counts; P has 256

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
        """Peak rate of the Cubes, in float16 and bfloat16."""
        return self.num_cores * self.clock_ghz * 2e-3 * self.cube_m * self.cube_n * self.cube_k

    @property
    def clock_hz(self) -> float:
        """Cycles a second."""
        return self.clock_ghz * 1e9

    def memory_rate(self, active_cores: int) -> float:
        """Bytes a cycle that a core gets from memory when `active_cores` read at once."""
        return min(self.hbm_rate, self.hbm_bytes_per_second / (self.clock_hz * active_cores))


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("910B1", 24, 1.85, 192 * MIB, 1.6e12),
        Chip("910B2", 24, 1.80, 192 * MIB, 1.6e12),
        Chip("910B3", 20, 1.80, 192 * MIB, 1.6e12),
        Chip("910B4", 20, 1.50, 96 * MIB, 0.8e12),
        Chip("910B4-1", 20, 1.50, 168 * MIB, 0.8e12),
        Chip("910_9362", 20, 1.50, 168 * MIB, 1.6e12, dies=2),
        Chip("910_9372", 20, 1.80, 192 * MIB, 1.6e12, dies=2),
        Chip("910_9382", 24, 1.80, 192 * MIB, 1.6e12, dies=2),
        Chip("910_9392", 24, 1.85, 192 * MIB, 1.6e12, dies=2),
    )
}
# P: these agree in everything above. 910C and A3 name no SKU: the fastest is meant.
_OTHER_NAMES = {
    "910B2C": "910B2",
    "910_9381": "910_9382",
    "910_9391": "910_9392",
    "910C": "910_9392",
    "A3": "910_9392",
}


def find_chip(name: str) -> Chip:
    """The chip that a device calls itself ("910B2", "Ascend910B2C", "Ascend910_9392"), or a die of "910C" or "A3".

    Raises ArgumentError for others.
    """
    plain = re.sub(r"^ascend[ _-]?", "", name.strip(), flags=re.IGNORECASE).upper()
    chip = CHIPS.get(_OTHER_NAMES.get(plain, plain))
    if chip is None:
        raise ArgumentError(f"chip={name!r} is not known; choose from {', '.join((*CHIPS, *_OTHER_NAMES))}")
    return chip
