"""Calls of transports on fake GPUs, and what they must return."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distributed.fake_gpus import Host, Stream
from fastattention.distributed.transports.p2p_base import PeerToPeer
from fastattention.distributed.transports.ring_order import shares_of
from fastattention.distributed.transports.ring_product import RingProduct

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
AROUND = 16  # elements before and after a result, which must not change


class FakeCall(NamedTuple):
    """A call: rows of each block, and their values."""

    blocks: tuple[int, ...]
    hidden: int = 24
    dtype: torch.dtype = HALF

    def rows(self, kind: type[PeerToPeer]) -> tuple[int, ...]:
        """Rows of each block for ring_product; one block of all rows for others."""
        return self.blocks if kind is RingProduct else (sum(self.blocks),)


CALLS = {
    "even": FakeCall((8, 8, 8), 16, BRAIN),
    "uneven": FakeCall((5, 23, 1, 7), 37, BRAIN),
    "one block": FakeCall((33,)),
    "one block of a few hundred KiB": FakeCall((150,), 501, SINGLE),
    "two blocks": FakeCall((2, 33), 40, SINGLE),
    "less than a share": FakeCall((1, 1, 2), 3),
    "one number": FakeCall((1,), 1, BRAIN),
    "many blocks": FakeCall((1, 3, 2) * 7, 5),
    "more than a granule": FakeCall((700, 300, 200), 500, SINGLE),
}


def part_of(rank: int, call: FakeCall, number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(sum(call.blocks), call.hidden, generator=generator).to(call.dtype)


def summed(host: Host, call: FakeCall, number: int = 0) -> Tensor:
    """The float32 sum in the order of ranks, rounded once. A ring starts after the owner, and each rank rounds."""
    parts = [part_of(rank, call, number) for rank in range(host.size)]
    if host.kind is not RingProduct:
        return reduce(torch.add, (part.float() for part in parts)).to(call.dtype)
    total = torch.empty_like(parts[0])
    for shares in shares_of(call.blocks, host.size):
        for owner, share in enumerate(shares):
            rows = slice(*share)
            ranks = ((owner + step) % host.size for step in range(1, host.size + 1))
            total[rows] = reduce(torch.add, (parts[rank][rows] for rank in ranks))
    return total


def sum_on(
    transport: PeerToPeer,
    rank: int,
    stream: Stream,
    call: FakeCall,
    number: int = 0,
    *,
    fails_at: int | None = None,
    before: Callable[[int, Tensor], None] = lambda block, out: None,
) -> Tensor:
    """Makes one call without waiting on the host, and returns what the compute stream then reads, with AROUND.

    fails_at: a block whose compute raises; before(block, result): called on the stream before it computes any of it.
    """
    mine, rows = part_of(rank, call, number), call.rows(type(transport))
    around = torch.full((mine.numel() + 2 * AROUND,), 7.0, dtype=mine.dtype)
    out = around[AROUND:-AROUND].view(mine.shape)
    stream.kept.append(around)
    ends = list(accumulate(rows))

    def compute(start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        block = bisect_left(ends, stop)
        if block == fails_at:
            raise MemoryError(f"no memory for block {block}")
        stream.enqueue(lambda: before(block, out))
        stream.enqueue(lambda: (partial.add_ if adds else partial.copy_)(mine[start:stop]))

    transport.run(compute, out, rows)
    found = torch.empty_like(around)
    stream.enqueue(lambda: found.copy_(around))
    return found


def check_all(ranks: Sequence[Sequence[Tensor]], host: Host, calls: Sequence[FakeCall]) -> None:
    """Checks that streams have read the sums of calls 0, 1, ... on all ranks, and nothing around them was written."""
    for number, (call, *results) in enumerate(zip(calls, *ranks, strict=True)):
        expected = summed(host, call, number)
        for found in results:
            assert torch.equal(found[AROUND:-AROUND].view(expected.shape), expected), f"call {number}: {call}"
            assert (found[:AROUND] == 7.0).all()
            assert (found[-AROUND:] == 7.0).all()


def check_calls(
    host: Host, calls: Sequence[FakeCall], look: Callable[[Any], Any] = lambda transport: None
) -> list[Any]:
    """Checks that calls in a row are right on every rank. Returns look(transport) after each, by rank."""

    def task(transport: PeerToPeer, rank: int, stream: Stream) -> list[tuple[Tensor, Any]]:
        return [(sum_on(transport, rank, stream, call, number), look(transport)) for number, call in enumerate(calls)]

    ranks = host.run(task)
    check_all([[found for found, _ in results] for results in ranks], host, calls)
    return [[seen for _, seen in results] for results in ranks]


def sum_on_two_streams(
    host: Host, transport: PeerToPeer, rank: int, call: FakeCall, modes: Sequence[bool]
) -> Iterator[Tensor]:
    """Makes calls in a row on two streams in turn, in inference mode where `modes` say so."""
    streams = host.here.streams
    streams.insert(1, Stream())
    for number, is_inference in enumerate(modes):
        streams[0], streams[1] = streams[1], streams[0]  # the first is the current one
        with torch.inference_mode(is_inference):
            yield sum_on(transport, rank, streams[0], call, number)
