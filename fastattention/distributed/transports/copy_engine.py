"""copy_engine: sums through memory that peers read, moved by the GPUs' copy engines.

NCCL's all-reduce takes tens of CTAs for as long as it lasts, and the matrix products beside it miss them; what is more,
a kernel of one stream seldom gets a multiprocessor while a product of another has them all. So here nothing but a short
addition runs on them, and it does so in the stream of the compute, after the block that follows. For each block of rows
every rank

    copies its share of the rows from every peer            COMPUTED    copy engine
    adds the parts up                                                   the stream of the compute
    copies from every peer what that one has added up       ADDED_UP    copy engine

Ranks meet by flags in memory, which streams wait for without a kernel. Shares are even, and rank r begins with what
rank r + 1 has, so that every link carries one copy at a time. Every rank gets the same bits, since each number is added
up once, in the order of the ranks. NVLink's multicast is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.backends.cuda import summing
from fastattention.distributed.exchange import timeout_of
from fastattention.distributed.transports.base import BlockTransport, Pending
from fastattention.distributed.transports.meetings import Meetings, Point
from fastattention.distributed.transports.on_one_host import OnOneHost, check_not_capturing
from fastattention.distributed.transports.watch import Watch
from fastattention.gpu_runtime.peer_memory import PeerMemory
from fastattention.gpu_runtime.streams import copy_async

ALIGNMENT = 16  # bytes at which shares begin


class CopyEngine(OnOneHost, BlockTransport):
    """Between GPUs of one host that can read each other's memory.

    The process of a rank that waits for another longer than the timeout of the group ends, unless it is a graph that
    waits (watch.py). It keeps the bytes of the largest call that it has served, of two of the largest blocks, and what
    CUDA graphs use.
    """

    name = "copy_engine"

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._meetings: Meetings | None = None
        # Of this rank's share, in turns.
        self._parts = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._turn = 0
        self._end = 0  # where the rows of the call under way end
        if self._reason is None:
            self._compute = self._stream  # from `begin` on that of the call: to ask for it takes as long as a launch
            # Recorded again and again, as making them takes longer: where one stream follows the other, by turn where
            # parts have been fetched, and where a block is complete.
            self._following, *self._fetched, self._complete = (torch.cuda.Event() for _ in range(4))  # type: ignore[no-untyped-call]
            self._watch = Watch(self.name, device, timeout_of(group._get_backend(device)).total_seconds())

    def begin(self, out: Tensor, rows: Sequence[int], room: int = 0) -> Tensor:
        """Rows that peers can read."""
        self._end, self._turn = out.data_ptr() + out.nbytes, 0
        self._compute = torch.cuda.current_stream(self._device)
        return super().begin(out, rows, room)

    def _take(self, nbytes: int) -> PeerMemory:
        memory = PeerMemory(nbytes, Meetings.flags_needed(self._size), self._device, self._group_name)
        self._meetings = Meetings(memory, self._rank, self._size)
        return memory

    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """On a stream of its own, but for the addition."""
        share = self._bytes_of_share(out.nbytes)
        block = _Block(partial, out, share, self._turn, last=out.data_ptr() + out.nbytes == self._end)
        self._take_parts(block.turn, self._size * share)
        self._keep_for_graphs(self._peers, self._parts[block.turn])
        self._turn = 1 - self._turn
        self._follow_compute()
        self._fetch_parts(block)
        self._fetched[block.turn].record(self._stream)
        return _Sum(self, block)

    def add_up(self, block: _Block) -> None:
        """On the stream of the compute: this rank's share, where its own part was and in the result."""
        self._fetched[block.turn].wait(self._compute)
        begin, nbytes = self._share_of(self._rank, block)
        if nbytes:
            parts = self._places_of_parts(block)
            count, dtype = nbytes // block.out.itemsize, block.out.dtype
            target, stream = block.out.data_ptr() + begin, self._compute.cuda_stream
            summing.sum_parts(parts, parts[self._rank], target, count, dtype, self._device.index, stream)

    def collect(self, block: _Block) -> None:
        """The other shares, each from the rank that added it up, once this one is."""
        self._follow_compute()
        self._meet(Point.ADDED_UP, block)
        for rank in self._in_turn():
            begin, nbytes = self._share_of(rank, block)
            if nbytes:
                self._copy(block.out.data_ptr() + begin, self._at(rank, block) + begin, nbytes)
        if block.last:
            self._meet(Point.READ, block)  # the next call writes what peers read in this one
            if not torch.cuda.is_current_stream_capturing():
                self._watch.finish(self._stream.cuda_stream)
        self._complete.record(self._stream)

    def wait(self) -> None:
        """The stream of the compute goes on when all blocks are complete that have been collected."""
        self._complete.wait(self._compute)

    def release(self) -> None:
        """Gives back what peers read, and its own parts."""
        super().release()
        self._meetings = None
        self._parts = [parts[:0].clone() for parts in self._parts]

    def reserve(self, nbytes: int, largest_block: int) -> None:
        """Memory that peers can read, and for this rank's parts of a block."""
        super().reserve(nbytes, largest_block)
        for turn in range(2):
            self._take_parts(turn, self._size * self._bytes_of_share(largest_block))

    def _bytes_of_share(self, block: int) -> int:
        """Of a block of so many bytes, at most."""
        return -(-block // (self._size * ALIGNMENT)) * ALIGNMENT

    def _follow_compute(self) -> None:
        self._following.record(self._compute)
        self._following.wait(self._stream)

    def _take_parts(self, turn: int, nbytes: int) -> None:
        if self._parts[turn].nbytes < nbytes:
            check_not_capturing()
            with torch.cuda.stream(self._stream):
                self._parts[turn] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _fetch_parts(self, block: _Block) -> None:
        self._meet(Point.COMPUTED, block)
        begin, nbytes = self._share_of(self._rank, block)
        parts = self._places_of_parts(block)
        for rank in self._in_turn() if nbytes else ():
            self._copy(parts[rank], self._at(rank, block) + begin, nbytes)

    def _places_of_parts(self, block: _Block) -> list[int]:
        """Of this rank's share, by rank: its own is left where it was computed."""
        places = [self._parts[block.turn].data_ptr() + rank * block.share for rank in range(self._size)]
        places[self._rank] = self._at(self._rank, block) + self._share_of(self._rank, block)[0]
        return places

    def _at(self, rank: int, block: _Block) -> int:
        """Where a rank has computed the block."""
        assert self._peers is not None
        return self._peers.addresses[rank] + block.partial.data_ptr() - self._peers.addresses[self._rank]

    def _share_of(self, rank: int, block: _Block) -> tuple[int, int]:
        """Where a rank's share of a block begins, and its bytes."""
        begin = min(rank * block.share, block.out.nbytes)
        return begin, min(block.share, block.out.nbytes - begin)

    def _in_turn(self) -> list[int]:
        """The other ranks, from the next one on."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def _meet(self, point: Point, block: _Block) -> None:
        assert self._meetings is not None
        self._meetings.meet(point, block.turn, self._stream.cuda_stream)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        copy_async(target, source, nbytes, self._stream.cuda_stream)


class _Block(NamedTuple):
    """Rows of a call."""

    partial: Tensor
    out: Tensor
    share: int  # bytes that a rank adds up, at most
    turn: int
    last: bool  # of its call


class _Sum(Pending):
    def __init__(self, transport: CopyEngine, block: _Block) -> None:
        self._transport, self._block = transport, block
        self._collected = False

    def advance(self) -> None:
        if not self._collected:
            self._transport.add_up(self._block)
            self._transport.collect(self._block)
            self._collected = True

    def wait(self) -> None:
        self.advance()
        self._transport.wait()
