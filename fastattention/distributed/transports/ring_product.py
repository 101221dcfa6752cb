"""ring_product: running sums go round the ranks by copy engines, and the product of each rank adds to them.

Elsewhere sums are added up by somebody, and what adds them up wants multiprocessors, or a place between two products.
A product can start from numbers that are there, and takes no longer for it. So of every block of rows each rank owns a
share, and the sum of a share goes from rank to rank:

    the rank after its owner computes it            step 0                            the stream of the compute
    the next rank fetches it                        flag "passed on"                  copy engine, a stream of its own
    and adds its own, as it computes it             step 1, ..., up to the owner's    the stream of the compute
    all other ranks fetch it from the owner         flag "complete"                   copy engine, another stream

While a sum is on its way, shares of the blocks before and after are computed: in turn t, step s of block t - s. Every
number is computed by each rank once and fetched as often as in any ring: what remains of the sums is the last block's.
Ranks tell each other by flags in memory, which streams wait for without a kernel. Operations are enqueued in such an
order that none waits for one behind it, on any rank: so streams may share a queue of the hardware.

Sums are rounded to their dtype after every rank, as in NCCL's rings. Every rank gets the same bits, the owner's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.backends.cuda.jit.streams import FlagWaits, FlagWrites, Meeting, copy_async
from fastattention.distributed.exchange import timeout_of
from fastattention.distributed.ring_order import MOST_BLOCKS, Share, shares_of, steps
from fastattention.distributed.transports.base import Compute
from fastattention.distributed.transports.on_one_host import OnOneHost
from fastattention.distributed.transports.peer_memory import PeerMemory
from fastattention.distributed.transports.watch import Watch


class RingProduct(OnOneHost):
    """Between GPUs of one host that can read each other's memory.

    The process of a rank that waits for another longer than the timeout of the group ends, unless it is a graph that
    waits (watch.py). It keeps the bytes of the largest call that it has served, and what CUDA graphs use.
    """

    name = "ring_product"
    asks_for_shares = True

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._flags: _Flags | None = None
        if self._reason is None:
            self._gathering = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            # Recorded again and again, as making them takes longer: where one stream follows another, and in turns
            # where the sum of a step is here.
            self._following = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._here = [[torch.cuda.Event() for _ in range(self._size)] for _ in range(2)]  # type: ignore[no-untyped-call]
            self._watch = Watch(self.name, device, timeout_of(group._get_backend(device)).total_seconds())

    def run(self, compute: Compute, out: Tensor, rows: Sequence[int], room: int = 0) -> None:
        """One block goes round as well, with nothing to be computed meanwhile."""
        call = _Call(compute, out, self.begin(out, rows, room), shares_of(rows, self._size))
        self._keep_for_graphs(self._peers)
        stream = torch.cuda.current_stream(self._device)
        self._follow(stream, self._stream)
        self._follow(stream, self._gathering)
        try:
            for block, step in steps(len(call.shares), self._size):
                self._step(call, block, step, stream)
        except BaseException:
            with contextlib.suppress(Exception):  # what failed first is what is raised
                self._give_up(stream)
                self._end(stream)
            raise
        self._end(stream)

    def _step(self, call: _Call, block: int, step: int, stream: torch.cuda.Stream) -> None:
        share = call.shares[block][self._owner(step)]
        if step:
            self._here[(block + step) % 2][step].wait(stream)
        # Of no rows too, so that whatever fails does so in the same step on all ranks.
        call.compute(share.start, share.stop, call.partials[share.start : share.stop], adds=step > 0)
        if step < self._size - 1:
            self._pass_on(call, block, step, stream)
        else:
            self._gather(call, block, stream)

    def _owner(self, step: int) -> int:
        """Whose share this rank computes in a step."""
        return (self._rank - 1 - step) % self._size

    def _pass_on(self, call: _Call, block: int, step: int, stream: torch.cuda.Stream) -> None:
        """Tells the next rank that a sum is ready, and fetches that of the rank before, for the next step."""
        assert self._flags is not None
        self._flags.pass_on[block][step].enqueue(stream.cuda_stream)
        self._flags.passed_on[block][step].enqueue(self._stream.cuda_stream)
        before = (self._rank - 1) % self._size
        self._fetch(call, call.shares[block][self._owner(step + 1)], before, call.partials, self._stream)
        self._here[(block + step + 1) % 2][step + 1].record(self._stream)

    def _gather(self, call: _Call, block: int, stream: torch.cuda.Stream) -> None:
        """Tells all that this rank's share is complete, and fetches all shares."""
        assert self._flags is not None
        self._flags.complete[block].enqueue(stream.cuda_stream)
        for step in range(1, self._size):
            rank = (self._rank + step) % self._size
            self._flags.completed[block][rank].enqueue(self._gathering.cuda_stream)
            self._fetch(call, call.shares[block][rank], rank, call.out, self._gathering)
        self._follow(stream, self._gathering)
        self._fetch(call, call.shares[block][self._rank], self._rank, call.out, self._gathering)

    def _fetch(self, call: _Call, share: Share, rank: int, target: Tensor, stream: torch.cuda.Stream) -> None:
        """A share of what a rank has computed, to the same rows of `target`."""
        assert self._peers is not None
        begin, end = share.start * call.row_bytes, share.stop * call.row_bytes
        if begin < end:
            copy_async(target.data_ptr() + begin, self._peers.addresses[rank] + begin, end - begin, stream.cuda_stream)

    def _give_up(self, stream: torch.cuda.Stream) -> None:
        """After an error, in one step on all ranks: all lower their flags, once nobody raises one of this call."""
        assert self._flags is not None
        self._follow(stream, self._gathering)
        self._follow(self._stream, self._gathering)
        self._flags.failed.enqueue(self._gathering.cuda_stream)
        for lower in self._flags.lower:
            lower.enqueue(self._gathering.cuda_stream)

    def _end(self, stream: torch.cuda.Stream) -> None:
        """The stream of the compute goes on when all is here that has been begun, and nobody reads this call's rows."""
        assert self._flags is not None
        self._flags.read.enqueue(self._gathering.cuda_stream)
        if not torch.cuda.is_current_stream_capturing():
            self._watch.finish(self._gathering.cuda_stream)
        self._follow(self._gathering, stream)

    def _follow(self, first: torch.cuda.Stream, second: torch.cuda.Stream) -> None:
        """What is enqueued on the second stream from now on begins after all that the first one has."""
        self._following.record(first)
        self._following.wait(second)

    def _take(self, nbytes: int) -> PeerMemory:
        memory = PeerMemory(nbytes, _Flags.needed(self._size), self._device, self._group_name)
        self._flags = _Flags(memory, self._rank, self._size)
        return memory

    def release(self) -> None:
        """Gives back what peers read, and knows its flags no more."""
        super().release()
        self._flags = None


class _Call(NamedTuple):
    compute: Compute
    out: Tensor
    partials: Tensor
    shares: list[list[Share]]  # by block and owner

    @property
    def row_bytes(self) -> int:
        return self.out.shape[1] * self.out.itemsize


class _Flags:
    """By which ranks tell each other: of every block and step "passed on", of every block and owner "complete"."""

    def __init__(self, memory: PeerMemory, rank: int, size: int) -> None:
        others = [(rank + step) % size for step in range(1, size)]
        after, blocks, ranks = (rank + 1) % size, range(MOST_BLOCKS), range(size)
        complete, read = MOST_BLOCKS * size, 2 * MOST_BLOCKS * size  # numbers of the first of a kind
        self.pass_on = [
            [FlagWrites([memory.flag(after, block * size + step)], 1) for step in ranks] for block in blocks
        ]
        self.passed_on = [[FlagWaits([memory.flag(rank, block * size + step)]) for step in ranks] for block in blocks]
        self.complete = [
            FlagWrites([memory.flag(other, complete + block * size + rank) for other in others], 1) for block in blocks
        ]
        self.completed = [
            [FlagWaits([memory.flag(rank, complete + block * size + owner)]) for owner in ranks] for block in blocks
        ]
        # Most are lowered by waiting for them. After an interrupt one may be up that nobody has begun to wait for.
        self.lower = [
            FlagWrites([memory.flag(rank, kind + number) for number in range(MOST_BLOCKS * size)], 0)
            for kind in (0, complete)
        ]
        # After a call; before that after one that failed, as between two meetings of a kind there must be another.
        self.read, self.failed = (
            Meeting(
                [memory.flag(rank, kind + other) for other in others],
                [memory.flag(other, kind + rank) for other in others],
            )
            for kind in (read, read + size)
        )

    @staticmethod
    def needed(size: int) -> int:
        """Of every rank, among so many."""
        return (2 * MOST_BLOCKS + 2) * size
