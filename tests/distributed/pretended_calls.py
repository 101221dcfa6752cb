"""Calls of transports on pretended GPUs, and what they must return."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from distributed.pretended_gpus import Stream
from fastattention.distributed.ring_order import shares_of
from fastattention.distributed.transports import Transport
from fastattention.distributed.transports.on_one_host import OnOneHost
from fastattention.distributed.transports.ring_product import RingProduct

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "even": ((8, 8, 8), {"hidden": 16, "dtype": BRAIN}),
    "uneven": ((5, 23, 1, 7), {"hidden": 37, "dtype": BRAIN}),
    "one block": ((33,), {"hidden": 24, "dtype": HALF}),
    "one block of a few hundred KiB": ((150,), {"hidden": 501, "dtype": SINGLE}),
    "two blocks": ((2, 33), {"hidden": 40, "dtype": SINGLE}),
    "less than a share": ((1, 1, 2), {"hidden": 3, "dtype": HALF}),
    "one number": ((1,), {"hidden": 1, "dtype": BRAIN}),
    "many blocks": ((1, 3, 2) * 7, {"hidden": 5, "dtype": HALF}),
    "more than a granule": ((700, 300, 200), {"hidden": 500, "dtype": SINGLE}),
}


def share_of(rank: int, call: int, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(rows, hidden, generator=generator).to(dtype)


def summed(kind: type[OnOneHost], size: int, call: int, blocks: tuple[int, ...], **like: Any) -> Tensor:
    """In float32 in the order of the ranks, rounded once. In a ring from the rank after the owner, rounded by each."""
    parts = [share_of(rank, call, sum(blocks), **like) for rank in range(size)]
    if kind is not RingProduct:
        return reduce(torch.add, (part.float() for part in parts)).to(parts[0].dtype)
    total = torch.empty_like(parts[0])
    for shares in shares_of(blocks, size):
        for owner, share in enumerate(shares):
            rows = slice(*share)
            total[rows] = reduce(torch.add, (parts[(owner + step) % size][rows] for step in range(1, size + 1)))
    return total


def sum_on(
    transport: Transport,
    rank: int,
    stream: Stream,
    call: int,
    blocks: tuple[int, ...],
    *,
    fails_at: int | None = None,
    before: Callable[[int, Tensor], None] = lambda block, out: None,
    **like: Any,
) -> Tensor:
    """One call, for which the host does not wait: what the stream of the compute then finds, with 16 numbers around.

    fails_at: a block whose compute raises; before(block, result): called on the stream before it computes any of it.
    """
    mine = share_of(rank, call, sum(blocks), **like)
    around = torch.empty(mine.numel() + 32, dtype=mine.dtype).fill_(7.0)
    out = around[16:-16].view(mine.shape)
    stream.kept.append(around)
    ends = list(accumulate(blocks))

    def compute(start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        block = bisect_left(ends, stop)
        if block == fails_at:
            raise MemoryError(f"no memory for block {block}")
        stream.enqueue(lambda: before(block, out))
        stream.enqueue(lambda: (partial.add_ if adds else partial.copy_)(mine[start:stop]))

    transport.run(compute, out, blocks)
    found = torch.empty_like(around)
    stream.enqueue(lambda: found.copy_(around))
    return found


def check(found: Tensor, kind: type[OnOneHost], size: int, call: int, blocks: tuple[int, ...], **like: Any) -> None:
    """What the stream has found is the sum, and nothing around it has been written."""
    expected = summed(kind, size, call, blocks, **like)
    assert torch.equal(found[16:-16].view(expected.shape), expected), f"call {call}: {blocks} {like}"
    assert (found[:16] == 7.0).all()
    assert (found[-16:] == 7.0).all()
