"""What a tensor-parallel attention block takes: the work of a call, and the time of its compute and of its all-reduce.

Plain Python. A call's compute and a group's all-reduce are measured where the call runs; a Machine predicts both from
rates. docs/tensor_parallel_plan.md has the model.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise

from fastattention.errors import ArgumentError


@dataclass(frozen=True)
class Workload:
    """One rank's share of a call. Rows are those of all sequences, one after the other: batch_size x seqlen_q.

    Raises ArgumentError if it cannot be.
    """

    batch_size: int
    seqlen_q: int
    seqlen_k: int
    nheads: int  # of this rank, and so is nheads_k
    nheads_k: int
    headdim: int
    headdim_v: int
    hidden: int  # columns of the result, which every rank has whole
    itemsize: int  # bytes of an element
    tp: int  # ranks
    causal: bool
    window_size: tuple[int, int] = (-1, -1)  # (left, right), -1 unlimited; causal sets right to 0
    whole_sequences: bool = False  # blocks may be cut between sequences only

    def __post_init__(self) -> None:
        for field in _POSITIVE:
            if getattr(self, field) < 1:
                raise ArgumentError(f"{field}={getattr(self, field)} is not positive")
        if self.seqlen_k < 0:
            raise ArgumentError(f"seqlen_k={self.seqlen_k} is negative")

    @property
    def rows(self) -> int:
        """Query tokens of all sequences."""
        return self.batch_size * self.seqlen_q

    @property
    def row_bytes(self) -> int:
        """What a row adds to the all-reduce."""
        return self.hidden * self.itemsize

    def visible_pairs(self, first: int, past: int) -> int:
        """Pairs of a query and a key that it sees, of rows first to past - 1 and one head."""
        return self._pairs_before(past) - self._pairs_before(first)

    def attention_flop(self) -> int:
        """Of both products, over all rows and this rank's heads; hidden pairs do not count."""
        return 2 * self.nheads * (self.headdim + self.headdim_v) * self.visible_pairs(0, self.rows)

    def linear_flop(self) -> int:
        """Of the product with the projection's weight, likewise."""
        return 2 * self.rows * self.nheads * self.headdim_v * self.hidden

    def _pairs_before(self, row: int) -> int:
        """Visible pairs of the rows before `row`, one of 0 to rows."""
        sequences, rest = divmod(row, self.seqlen_q)
        return sequences * self._pairs_of_sequence(self.seqlen_q) + self._pairs_of_sequence(rest)

    def _pairs_of_sequence(self, count: int) -> int:
        """Visible pairs of the first `count` queries of a sequence."""
        offset = self.seqlen_k - self.seqlen_q
        left, right = self.window_size[0], 0 if self.causal else self.window_size[1]
        past_last = count * self.seqlen_k if right < 0 else self._sum_of_keys(offset + right + 1, count)
        return past_last - (0 if left < 0 else self._sum_of_keys(offset - left, count))

    def _sum_of_keys(self, first: int, count: int) -> int:
        """The sum of first, first + 1, ..., `count` numbers, each brought into 0 to seqlen_k."""

        def below(number: int) -> int:
            inside = min(max(number, 0), self.seqlen_k)
            return inside * (inside - 1) // 2 + self.seqlen_k * max(number - self.seqlen_k, 0)

        return below(first + count) - below(first)


_POSITIVE = "batch_size seqlen_q nheads nheads_k headdim headdim_v hidden itemsize tp".split()


@dataclass(frozen=True)
class ComputeCost:
    """Seconds of a call's compute on one rank, nothing else running. Raises ArgumentError if it cannot be."""

    attention_seconds: float  # of all rows at once
    linear_seconds: float  # likewise, the product with the projection's weight
    block_seconds: float  # what one more block adds: launches, and waves of CTAs that are not full

    def __post_init__(self) -> None:
        _check_not_negative(self, "attention_seconds", "linear_seconds", "block_seconds")

    @property
    def seconds(self) -> float:
        """Of all rows at once."""
        return self.attention_seconds + self.linear_seconds


Table = tuple[tuple[int, float], ...]  # (bytes, seconds) of all-reduces, bytes ascending


@dataclass(frozen=True)
class TransportCost:
    """One way to all-reduce in one group. Raises ArgumentError if it cannot be."""

    name: str
    table: Table  # of an all-reduce that is made to run beside compute, while there is none
    slowdown: float  # compute under it takes 1 + slowdown times as long
    serial_table: Table = ()  # of one that has nothing to run beside; empty: the same
    own_slowdown: float = 0.0  # beside compute it takes 1 + own_slowdown times as long

    def __post_init__(self) -> None:
        _check_not_negative(self, "slowdown", "own_slowdown")
        for table in (self.table, self.serial_table or self.table):
            sizes = [size for size, _ in table]
            if not sizes or sizes[0] < 1 or any(size >= larger for size, larger in pairwise(sizes)):
                raise ArgumentError(f"table of {self.name} has bytes {sizes}; they must be positive and ascend")
            if not all(seconds >= 0 for _, seconds in table):
                raise ArgumentError(f"table of {self.name} has negative seconds")

    def seconds(self, size: int) -> float:
        """Of an all-reduce of `size` bytes: interpolated; the first entry's below it, in proportion beyond the last."""
        return _interpolated(self.table, size)

    def serial_seconds(self, size: int) -> float:
        """Likewise, with nothing to run beside."""
        return _interpolated(self.serial_table or self.table, size)


def _interpolated(table: Table, size: int) -> float:
    position = bisect_left(table, (size, 0.0))
    if position == 0:
        return table[0][1]
    lower, lower_seconds = table[position - 1]
    if position == len(table):
        return lower_seconds * size / lower
    upper, upper_seconds = table[position]
    return lower_seconds + (upper_seconds - lower_seconds) * (size - lower) / (upper - lower)


@dataclass(frozen=True)
class Machine:
    """Devices of a host and what connects them. Raises ArgumentError if it cannot be."""

    name: str
    attention_rate: float  # FLOP a second of causal prompts, hidden pairs not counted
    linear_rate: float  # FLOP a second of the projection
    block_seconds: float  # as in ComputeCost
    transports: tuple[TransportCost, ...]
    tp: int  # ranks among which the tables hold

    def __post_init__(self) -> None:
        for field in ("attention_rate", "linear_rate"):
            if not getattr(self, field) > 0:
                raise ArgumentError(f"{field}={getattr(self, field)} of {self.name} is not positive")
        if self.tp < 2:
            raise ArgumentError(f"tp={self.tp} of {self.name} leaves nothing to reduce; use 2 or more")
        _check_not_negative(self, "block_seconds")

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

        transports = (
            replace(one, table=scaled(one.table), serial_table=scaled(one.serial_table)) for one in self.transports
        )
        return replace(self, transports=tuple(transports), tp=tp)


def _check_not_negative(cost: ComputeCost | TransportCost | Machine, *fields: str) -> None:
    for field in fields:
        if not getattr(cost, field) >= 0:
            raise ArgumentError(f"{field}={getattr(cost, field)} is negative")


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
                    # Chosen: gains of five measured loops (docs/tensor_parallel_plan.md) are then predicted within 6%.
                    slowdown=1.3,
                ),
                TransportCost(
                    "copy_engine",
                    (
                        (64 * KIB, 100e-6),  # assumed
                        (64 * MIB, 390e-6),  # measured, and so are all larger
                        (128 * MIB, 708e-6),
                        (256 * MIB, 1339e-6),
                    ),
                    slowdown=0.02,  # measured: of a product
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
                    slowdown=0.09,  # measured: products that leave 8 multiprocessors free 1.07 to 1.12, attention 1.04
                ),
            ),
            tp=4,
        ),
        Machine(
            "v100-pcie",
            attention_rate=35e12,  # PyTorch's CUTLASS kernel, measured by others: docs/volta.md
            linear_rate=83e12,  # cuBLAS, likewise
            block_seconds=40e-6,
            transports=(_predicted("c10d", 9e9, latency=60e-6, slowdown=0.1, tp=4),),  # PCIe 3, of 16 GB/s on paper
            tp=4,
        ),
        Machine(
            "ascend-910b",
            attention_rate=200e12,  # the simulator's prediction for a 910B2: docs/ascend.md
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
