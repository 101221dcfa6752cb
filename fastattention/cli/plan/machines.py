"""Machines that `fastattention plan allreduce` knows: rates of their devices and links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from fastattention.distributed.row_partitions import OVERLAPPED, RING, Recipe
from fastattention.errors import ArgumentError


@dataclass(frozen=True)
class AllReduce:
    """A transport that all-reduces each block after its GEMM."""

    name: str
    table: tuple[tuple[int, float], ...]  # (bytes, seconds) of all-reduces with no compute beside them, bytes ascending
    recipes: tuple[Recipe, ...] = ()  # what is tried besides all rows in one block
    slowdown: float = 0.0  # compute beside an all-reduce takes 1 + slowdown times as long
    own_slowdown: float = 0.0  # an all-reduce beside compute takes 1 + own_slowdown times as long

    def seconds(self, size: int) -> float:
        """Seconds of an all-reduce of `size` bytes, interpolated. Below the table constant, above it proportional."""
        sizes = [size for size, _ in self.table]
        return float(np.interp(size, sizes, [seconds for _, seconds in self.table])) * max(size / sizes[-1], 1.0)


@dataclass(frozen=True)
class Ring:
    """A transport whose partial sums go round the ranks, the GEMM of each adding to them."""

    name: str
    bandwidth: float  # bytes a second that a rank fetches
    fetch_seconds: float  # what a fetch takes beyond its bytes
    notice_seconds: float  # from the end of a GEMM until the next rank fetches its result
    product_seconds: float  # what a GEMM takes beyond its share of the GEMM of all rows
    slowdown: float  # compute beside fetches takes 1 + slowdown times as long
    recipes: tuple[Recipe, ...] = RING


@dataclass(frozen=True)
class Machine:
    """Devices of a host and what connects them."""

    name: str
    attention_rate: float  # FLOP a second of causal prompts, hidden pairs not counted
    projection_rate: float  # FLOP a second of the projection
    block_seconds: float  # what a block costs: launches, and waves of CTAs that are not full
    transports: tuple[AllReduce | Ring, ...]
    tp: int  # number of ranks for which the tables hold

    def among(self, tp: int) -> Machine:
        """The same with another number of ranks.

        A rank moves 2 (tp - 1) / tp bytes for each byte that is reduced. The bytes that it moves a second are assumed
        to stay the same.
        """
        factor = (tp - 1) / tp / ((self.tp - 1) / self.tp)
        transports = tuple(
            replace(one, table=tuple((size, seconds * factor) for size, seconds in one.table))
            if isinstance(one, AllReduce)
            else one
            for one in self.transports
        )
        return replace(self, transports=transports, tp=tp)


KIB = 1024
MIB = 1024 * KIB


def _assumed(bus_bandwidth: float, tp: int) -> AllReduce:
    """An AllReduce from a latency and the bytes that a rank moves a second."""
    table = tuple((size, 60e-6 + 2 * (tp - 1) / tp * size / bus_bandwidth) for size in (KIB, 1024 * MIB))
    return AllReduce("c10d", table, OVERLAPPED, slowdown=0.1)


# "Measured" figures are from 4 H200 with NVLink (multicast off) and torch 2.11. All others are assumed, unless a source
# is named.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "h200",
            attention_rate=500e12,  # measured: 452 to 648, cuDNN, causal, 2K to 32K tokens, 8 or 16 heads a rank
            projection_rate=680e12,  # measured: 603 to 702
            block_seconds=20e-6,
            transports=(
                AllReduce(
                    "c10d",  # NCCL
                    (
                        (64 * KIB, 30e-6),  # assumed
                        (16 * MIB, 117e-6),  # measured, 215 GB/s of bus bandwidth; its size is assumed
                        (64 * MIB, 334e-6),  # measured, and so are all larger
                        (128 * MIB, 626e-6),
                        (256 * MIB, 1206e-6),
                        (512 * MIB, 2460e-6),
                    ),
                    OVERLAPPED,
                    # Chosen to predict the measurements best, see docs/internals/tensor-parallel-plan.md.
                    slowdown=0.4,
                    own_slowdown=0.35,
                ),
                AllReduce(
                    "peer_kernel",
                    (
                        (128 * KIB, 20e-6),  # measured, and so are all larger: 8 CTAs
                        (8 * MIB, 68e-6),
                        (32 * MIB, 186e-6),
                        (64 * MIB, 350e-6),
                        (256 * MIB, 1311e-6),
                    ),
                ),
                # Fitted to twelve calls of two ranks, which are then predicted within 3%; not measured with more ranks.
                Ring(
                    "ring_product",
                    bandwidth=330e9,
                    fetch_seconds=5e-6,
                    notice_seconds=10e-6,
                    product_seconds=8e-6,
                    slowdown=0.13,
                ),
            ),
            tp=4,
        ),
        Machine(
            "v100-pcie",
            attention_rate=35e12,  # PyTorch's CUTLASS kernel, measured by others: docs/internals/volta.md
            projection_rate=83e12,  # cuBLAS, measured by others
            block_seconds=40e-6,
            transports=(_assumed(9e9, tp=4),),  # PCIe 3, of 16 GB/s on paper
            tp=4,
        ),
        Machine(
            "ascend-910b",
            attention_rate=185e12,  # the simulator's prediction for a 910B2: docs/internals/ascend-simulator.md
            projection_rate=260e12,  # of 354 published
            block_seconds=40e-6,
            # HCCL, chosen so that prompts of LLaMA-2 spend 40 to 87% of their time on it, as in the FastAttention
            # paper.
            transports=(_assumed(100e9, tp=8),),
            tp=8,
        ),
    )
}


def find_machine(name: str, tp: int) -> Machine:
    """The preset of that name among `tp` ranks. Raises ArgumentError for another name, or for fewer than two ranks."""
    if name not in MACHINES:
        raise ArgumentError(f"hardware={name!r} is not known; choose from {', '.join(MACHINES)}")
    if tp < 2:
        raise ArgumentError(f"tp={tp} of {name} leaves nothing to reduce; use 2 or more")
    return MACHINES[name].among(tp)
