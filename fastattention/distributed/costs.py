"""What a tensor-parallel attention block takes: the work of a call, and the time of its compute and of its all-reduce.

Plain Python. A call's compute and a group's all-reduce are measured where the call runs; machines.py predicts both
from rates. docs/internals/tensor-parallel-plan.md has the model.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
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
        check_not_negative(self, "attention_seconds", "linear_seconds", "block_seconds")

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
        check_not_negative(self, "slowdown", "own_slowdown")
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
class RingCost:
    """Sums that go round the ranks of one group while each adds its own. Raises ArgumentError if it cannot be."""

    name: str
    bandwidth: float  # bytes a second that a rank fetches
    fetch_seconds: float  # what a fetch takes beyond its bytes
    notice_seconds: float  # from the end of a product to where the next rank fetches what it has computed
    product_seconds: float  # what one more product adds to compute
    slowdown: float  # compute beside fetches takes 1 + slowdown times as long

    def __post_init__(self) -> None:
        check_not_negative(self, "fetch_seconds", "notice_seconds", "product_seconds", "slowdown")
        if not self.bandwidth > 0:
            raise ArgumentError(f"bandwidth={self.bandwidth} of {self.name} is not positive")


def check_not_negative(cost: object, *fields: str) -> None:
    """Raises ArgumentError unless all these fields are numbers from 0."""
    for field in fields:
        if not getattr(cost, field) >= 0:
            raise ArgumentError(f"{field}={getattr(cost, field)} is negative")
