"""Presets of machines: what a tensor-parallel call takes where it cannot be measured. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastattention.distributed.costs import (
    ComputeCost,
    RingCost,
    Table,
    TransportCost,
    Workload,
    check_not_negative,
)
from fastattention.errors import ArgumentError


@dataclass(frozen=True)
class Machine:
    """Devices of a host and what connects them. Raises ArgumentError if it cannot be."""

    name: str
    attention_rate: float  # FLOP a second of causal prompts, hidden pairs not counted
    linear_rate: float  # FLOP a second of the projection
    block_seconds: float  # as in ComputeCost
    transports: tuple[TransportCost | RingCost, ...]
    tp: int  # ranks among which the tables hold

    def __post_init__(self) -> None:
        for field in ("attention_rate", "linear_rate"):
            if not getattr(self, field) > 0:
                raise ArgumentError(f"{field}={getattr(self, field)} of {self.name} is not positive")
        if self.tp < 2:
            raise ArgumentError(f"tp={self.tp} of {self.name} leaves nothing to reduce; use 2 or more")
        check_not_negative(self, "block_seconds")

    def compute(self, workload: Workload) -> ComputeCost:
        """Predicted for prompts, whose time is that of their arithmetic and, between the two, that of one block."""
        return ComputeCost(
            workload.attention_flop() / self.attention_rate + self.block_seconds / 2,
            workload.linear_flop() / self.linear_rate + self.block_seconds / 2,
            self.block_seconds,
        )

    def among(self, tp: int) -> Machine:
        """The same with another number of ranks.

        A rank moves 2 (tp - 1) / tp bytes for each that is reduced, and what it moves in a second is taken to stay.
        """
        factor = (tp - 1) / tp / ((self.tp - 1) / self.tp)

        def scaled(table: Table) -> Table:
            return tuple((size, seconds * factor) for size, seconds in table)

        def among(one: TransportCost | RingCost) -> TransportCost | RingCost:
            if isinstance(one, RingCost):
                return one
            return replace(one, table=scaled(one.table), serial_table=scaled(one.serial_table))

        return replace(self, transports=tuple(map(among, self.transports)), tp=tp)


KIB = 1024
MIB = 1024 * KIB


def _predicted(name: str, bus_bandwidth: float, latency: float, slowdown: float, tp: int) -> TransportCost:
    """All-reduces by a latency and the bytes that a rank moves in a second."""
    table = tuple((size, latency + 2 * (tp - 1) / tp * size / bus_bandwidth) for size in (KIB, 1024 * MIB))
    return TransportCost(name, table, slowdown)


# Measured means: on 4 H200 with NVLink (multicast off) and torch 2.11. All else is assumed, unless it has a source.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine(
            "h200",
            attention_rate=500e12,  # measured: 452 to 648, cuDNN, causal, 2K to 32K tokens, 8 or 16 heads a rank
            linear_rate=680e12,  # measured: 603 to 702
            block_seconds=20e-6,
            transports=(
                TransportCost(
                    "c10d",  # NCCL
                    (
                        (64 * KIB, 30e-6),  # assumed
                        (16 * MIB, 117e-6),  # measured, 215 GB/s of bus bandwidth; for which size is assumed
                        (64 * MIB, 334e-6),  # measured, and so are all larger
                        (128 * MIB, 626e-6),
                        (256 * MIB, 1206e-6),
                        (512 * MIB, 2460e-6),
                    ),
                    # Chosen, as that of peer_kernel: what was measured is then predicted best, see
                    # docs/internals/tensor-parallel-plan.md.
                    slowdown=0.4,
                    own_slowdown=0.35,
                ),
                TransportCost(
                    "copy_engine",
                    (
                        (64 * KIB, 100e-6),  # assumed
                        (64 * MIB, 390e-6),  # measured, and so are all larger
                        (128 * MIB, 708e-6),
                        (256 * MIB, 1339e-6),
                    ),
                    slowdown=0.1,  # measured: compute 4 to 15% longer in traces, of which some is for blocks
                ),
                TransportCost(
                    "peer_kernel",
                    (
                        (128 * KIB, 20e-6),  # measured, and so are all larger: 8 CTAs
                        (8 * MIB, 68e-6),
                        (32 * MIB, 186e-6),
                        (64 * MIB, 350e-6),
                        (256 * MIB, 1311e-6),
                    ),
                    slowdown=0.3,
                ),
                # Of two ranks, fitted to twelve calls, which are then predicted within 3%; not measured among more.
                RingCost(
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
            linear_rate=83e12,  # cuBLAS, likewise
            block_seconds=40e-6,
            transports=(_predicted("c10d", 9e9, latency=60e-6, slowdown=0.1, tp=4),),  # PCIe 3, of 16 GB/s on paper
            tp=4,
        ),
        Machine(
            "ascend-910b",
            attention_rate=200e12,  # the simulator's prediction for a 910B2: docs/internals/ascend-simulator.md
            linear_rate=260e12,  # of 354 published
            block_seconds=40e-6,
            # HCCL; so that prompts of LLaMA-2 spend 40 to 87% of their time on it, as in the FastAttention paper.
            transports=(_predicted("c10d", 100e9, latency=60e-6, slowdown=0.1, tp=8),),
            tp=8,
        ),
    )
}


def find_machine(name: str, tp: int) -> Machine:
    """The preset of that name among `tp` ranks. Raises ArgumentError for another name, or for fewer than two ranks."""
    if name not in MACHINES:
        raise ArgumentError(f"hardware={name!r} is not known; choose from {', '.join(MACHINES)}")
    return MACHINES[name].among(tp)
