"""Predicts how long the row partitions of a tensor-parallel prompt take: compute in one lane, all-reduces in the other.

The model is for machines that are not at hand. Calls do not use it: they time their partitions. Plain Python.
docs/internals/tensor-parallel-plan.md has the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from fastattention.cli.plan.machines import AllReduce, Machine, Ring
from fastattention.distributed.row_partitions import Partition, partitions, worth_dividing
from fastattention.distributed.transports.ring_order import steps

LEAST_GAIN = 0.03  # share of the serial time; the rates are no more certain than that


@dataclass(frozen=True)
class Prompt:
    """One rank's share of causal prompts. Rows are the rows of all sequences, one after the other."""

    batch_size: int
    seqlen: int  # queries, and keys
    nheads: int  # heads of this rank
    headdim: int
    headdim_v: int
    hidden: int  # columns of the result, which every rank has whole
    itemsize: int  # bytes of an element
    tp: int  # ranks

    @property
    def rows(self) -> int:
        """Tokens of all sequences."""
        return self.batch_size * self.seqlen

    @property
    def row_bytes(self) -> int:
        """Bytes that a row adds to the all-reduce."""
        return self.hidden * self.itemsize

    def attention_flop(self, first: int, past: int) -> int:
        """FLOP of both products, for rows first to past - 1 and this rank's heads, without hidden pairs."""
        pairs = self._visible_pairs(past) - self._visible_pairs(first)
        return 2 * self.nheads * (self.headdim + self.headdim_v) * pairs

    def projection_flop(self, rows: int) -> int:
        """FLOP of the product with the projection's weight, for this rank."""
        return 2 * rows * self.nheads * self.headdim_v * self.hidden

    def _visible_pairs(self, row: int) -> int:
        """Pairs of a query before `row` and a key that it sees, in one head."""
        sequences, rest = divmod(row, self.seqlen)
        return sequences * (self.seqlen * (self.seqlen + 1) // 2) + rest * (rest + 1) // 2


class Event(NamedTuple):
    """When something ran, in seconds since the call began, and of which block."""

    start: float
    end: float
    block: int


class Timeline(NamedTuple):
    """What each lane was busy with, in order."""

    compute: tuple[Event, ...]
    communication: tuple[Event, ...]

    @property
    def seconds(self) -> float:
        """Seconds until the last all-reduce is done."""
        return self.communication[-1].end


class Prediction(NamedTuple):
    """A partition of a call's rows by one transport, in time."""

    transport: str
    partition: Partition
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Seconds of the call."""
        return self.timeline.seconds


class Choice(NamedTuple):
    """The fastest way to make a call, and what it is compared with."""

    best: Prediction
    serial: Prediction  # one block, by the transport that is fastest for it
    compute_seconds: float  # one block without an all-reduce
    all_reduce_seconds: float  # one block by the transport of `best`, without compute

    @property
    def exposed_seconds(self) -> float:
        """Seconds of the call beyond its compute alone."""
        return self.best.seconds - self.compute_seconds

    @property
    def hidden(self) -> float:
        """The share of the time of an all-reduce alone that the call does not wait for."""
        return max(0.0, 1 - self.exposed_seconds / self.all_reduce_seconds)

    @property
    def gain(self) -> float:
        """How many times faster than serial."""
        return self.serial.seconds / self.best.seconds


def choose(prompt: Prompt, machine: Machine) -> Choice:
    """The fastest of the partitions that calls try, by all transports. Several blocks must gain LEAST_GAIN over one."""
    one_block = Partition((prompt.rows,))
    undivided = {one.name: predict(prompt, machine, one, one_block) for one in machine.transports}
    best = serial = min(undivided.values(), key=lambda found: found.seconds)
    if worth_dividing(prompt.rows, prompt.rows * prompt.row_bytes):
        divided = [
            predict(prompt, machine, one, partition)
            for one in machine.transports
            for _, partition in partitions(one.recipes, prompt.batch_size, prompt.seqlen, whole_sequences=False)
        ]
        fastest = min(divided, key=lambda found: found.seconds, default=serial)
        if fastest.seconds <= (1 - LEAST_GAIN) * serial.seconds:
            best = fastest
    [attention] = attention_seconds(prompt, machine, one_block)
    compute = attention + projection_seconds(prompt, machine, prompt.rows)
    return Choice(best, serial, compute, undivided[best.transport].seconds - compute)


def predict(prompt: Prompt, machine: Machine, transport: AllReduce | Ring, partition: Partition) -> Prediction:
    """The partition in time, by the transport."""
    attention = attention_seconds(prompt, machine, partition)
    if isinstance(transport, Ring):
        product = projection_seconds(prompt, machine, prompt.rows) / prompt.rows
        timeline = round_the_ring(prompt, transport, partition.rows, attention, product)
    else:
        work = [
            seconds + projection_seconds(prompt, machine, rows)
            for seconds, rows in zip(attention, partition.rows, strict=True)
        ]
        transfers = [transport.seconds(rows * prompt.row_bytes) for rows in partition.rows]
        timeline = one_after_the_other(work, transfers, transport.slowdown, transport.own_slowdown)
    return Prediction(transport.name, partition, timeline)


def projection_seconds(prompt: Prompt, machine: Machine, rows: int) -> float:
    """Seconds of one GEMM."""
    return prompt.projection_flop(rows) / machine.projection_rate + machine.block_seconds / 2


def attention_seconds(prompt: Prompt, machine: Machine, partition: Partition) -> list[float]:
    """Seconds by block: those of the parts of attention that begin with it.

    A part that begins inside a sequence counts as another block: the keys before it are a rectangle besides its
    triangle.
    """
    parts = pairwise(accumulate(partition.attention_rows or partition.rows, initial=0))
    by_block, attended = [], 0
    for end in accumulate(partition.rows):
        seconds = 0.0
        while attended < end:
            first, attended = next(parts)
            blocks = 0.5 if first % prompt.seqlen == 0 else 1.5
            flop = prompt.attention_flop(first, attended)
            seconds += flop / machine.attention_rate + blocks * machine.block_seconds
        by_block.append(seconds)
    return by_block


def one_after_the_other(
    compute: Sequence[float], communication: Sequence[float], slowdown: float, own_slowdown: float
) -> Timeline:
    """Compute is never held up; an all-reduce begins when its compute and the all-reduce before it are done.

    compute, communication: seconds of each block's compute and of its all-reduce, each alone
    """
    clock = left = 0.0  # left: seconds of the all-reduces that may begin, alone
    computed: list[Event] = []
    for block, (work, transfer) in enumerate(zip(compute, communication, strict=True)):
        beside = min(work * (1 + slowdown), left * (1 + own_slowdown))  # seconds in which both lanes are busy
        start, clock = clock, clock + work + beside * (1 - 1 / (1 + slowdown))
        left += transfer - beside / (1 + own_slowdown)
        computed.append(Event(start, clock, block))
    end, reduced = 0.0, []
    for own, transfer in zip(computed, communication, strict=True):
        start = max(own.end, end)
        # Compute has no gaps, so it runs beside all-reduces until its end.
        beside = min(transfer * (1 + own_slowdown), max(clock - start, 0.0))
        end = start + transfer + beside * (1 - 1 / (1 + own_slowdown))
        reduced.append(Event(start, end, own.block))
    return Timeline(tuple(computed), tuple(reduced))


def round_the_ring(
    prompt: Prompt, ring: Ring, rows: Sequence[int], attention: Sequence[float], product: float
) -> Timeline:
    """A timeline with a GEMM and a fetch for each step of every block; the last fetch is from all others.

    Compute waits for the sums to which it adds, and fetches for each other. Fetches are not slowed down.
    attention: seconds by block
    product: seconds of a GEMM for each row
    """
    clock = link = 0.0
    computed, fetched = [], []
    here: dict[tuple[int, int], float] = {}  # when the sum to which a step adds has been fetched
    for block, step in steps(len(rows), prompt.tp):
        share = rows[block] / prompt.tp
        work = share * product + ring.product_seconds + (0.0 if step else attention[block])
        start = max(clock, here.get((block, step), 0.0))
        beside = min(work * (1 + ring.slowdown), max(link - start, 0.0))
        clock = start + work + beside * (1 - 1 / (1 + ring.slowdown))
        computed.append(Event(start, clock, block))
        begin = max(link, clock + ring.notice_seconds)
        fetches = prompt.tp - 1 if step == prompt.tp - 1 else 1
        link = begin + fetches * (share * prompt.row_bytes / ring.bandwidth + ring.fetch_seconds)
        fetched.append(Event(begin, link, block))
        here[block, step + 1] = link
    noticed = fetched[-1]._replace(end=link + ring.notice_seconds)  # at the end all ranks have to notice
    return Timeline(tuple(computed), (*fetched[:-1], noticed))
