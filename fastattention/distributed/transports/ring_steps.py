"""The operations that a rank enqueues after each step of ring_product, prepared for all calls of a kind.

A call of four blocks between two ranks enqueues some forty operations besides launches. Preparing them for every call
doubled the host time, and calls of less than a millisecond waited for the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastattention.distributed.transports.ring_order import MOST_BLOCKS, Share, shares_of, steps
from fastattention.engine.bounded import BoundedDict
from fastattention.gpu_runtime.peer_memory import PeerMemory
from fastattention.gpu_runtime.streams import FlagWaits, FlagWrites, StreamBarrier, StreamOperation, copy_operation

MOST_KEPT = 64  # kinds of calls


class Kind(NamedTuple):
    """Calls whose steps differ only in the address of the result."""

    rows: tuple[int, ...]  # rows of each block
    shape: torch.Size  # shape of the result: (rows, hidden)
    dtype: torch.dtype
    # Steps write to views of memory, and a view made in inference mode cannot be written outside of it.
    is_inference: bool
    stream: int  # the compute stream, which is the current one


class RowCopy(NamedTuple):
    """A copy of rows that a rank has computed."""

    begin: int  # bytes from the first row of the call
    source: int
    nbytes: int


class PassOn(NamedTuple):
    """The sum goes on to the next rank, and the sum of the previous rank comes here."""

    operations: tuple[StreamOperation, ...]
    here: torch.cuda.Event  # to be recorded after them


class Gather(NamedTuple):
    """The sum is complete, and all shares are fetched."""

    complete: tuple[StreamOperation]
    of_others: tuple[tuple[tuple[StreamOperation], RowCopy], ...]  # to the result: the flag to wait for, and the copy
    own: RowCopy


class Step(NamedTuple):
    """A share of a block that this rank computes."""

    share: Share
    sum: Tensor  # (rows of the share, hidden): this rank writes its part to it, or adds it
    before: torch.cuda.Event | None  # recorded when the sum to which it is added is here; None where a sum begins
    then: PassOn | Gather


class RingSteps:
    """The steps of one rank, in memory that peers read."""

    def __init__(
        self,
        memory: PeerMemory,
        rank: int,
        size: int,
        here: Sequence[Sequence[torch.cuda.Event]],
        fetching: torch.cuda.Stream,
        gathering: torch.cuda.Stream,
    ) -> None:
        """here: events by turn and step, of sums that arrive on `fetching`; gathering: the stream of complete sums."""
        self.flags = RingFlags(memory, rank, size)
        self._memory = memory
        self._rank, self._size, self._here = rank, size, here
        self._fetching, self._gathering = fetching.cuda_stream, gathering.cuda_stream
        self._kept: BoundedDict[Kind, tuple[torch.cuda.Stream, tuple[Step, ...]]] = BoundedDict(MOST_KEPT)

    def of(self, kind: Kind, out: Tensor) -> tuple[torch.cuda.Stream, tuple[Step, ...]]:
        """The compute stream, and the steps in their order. out: a result of that kind."""
        return self._kept.get(kind) or self._make(kind, out)

    def _make(self, kind: Kind, out: Tensor) -> tuple[torch.cuda.Stream, tuple[Step, ...]]:
        shares, sums = shares_of(kind.rows, self._size), self._memory.like(out)
        order = steps(len(shares), self._size)
        made = tuple(self._step(kind, sums, shares[block], block, step) for block, step in order)
        kept = self._kept[kind] = torch.cuda.current_stream(out.device), made
        return kept

    def _step(self, kind: Kind, sums: Tensor, shares: Sequence[Share], block: int, step: int) -> Step:
        before = self._here[(block + step) % 2][step] if step else None
        goes_on = step < self._size - 1
        then = self._pass_on(kind, shares, block, step) if goes_on else self._gather(kind, shares, block)
        share = shares[self._owner(step)]
        return Step(share, sums[slice(*share)], before, then)

    def _owner(self, step: int) -> int:
        """The owner of the share that this rank computes in a step."""
        return (self._rank - 1 - step) % self._size

    def _pass_on(self, kind: Kind, shares: Sequence[Share], block: int, step: int) -> PassOn:
        ready = self.flags.pass_on[block][step].on(kind.stream)
        operations = [ready, self.flags.passed_on[block][step].on(self._fetching)]
        copy = self._copy(kind, shares[self._owner(step + 1)], (self._rank - 1) % self._size)
        if copy.nbytes:
            target = self._memory.addresses[self._rank] + copy.begin
            operations.append(copy_operation(target, copy.source, copy.nbytes, self._fetching))
        return PassOn(tuple(operations), self._here[(block + step + 1) % 2][step + 1])

    def _gather(self, kind: Kind, shares: Sequence[Share], block: int) -> Gather:
        others = [(self._rank + step) % self._size for step in range(1, self._size)]
        return Gather(
            (self.flags.complete[block].on(kind.stream),),
            tuple(
                ((self.flags.completed[block][rank].on(self._gathering),), self._copy(kind, shares[rank], rank))
                for rank in others
            ),
            self._copy(kind, shares[self._rank], self._rank),
        )

    def _copy(self, kind: Kind, share: Share, rank: int) -> RowCopy:
        row_bytes = kind.shape[1] * kind.dtype.itemsize
        begin, end = share.start * row_bytes, share.stop * row_bytes
        return RowCopy(begin, self._memory.addresses[rank] + begin, end - begin)


class RingFlags:
    """Flags between ranks: "passed on" for every block and step, "complete" for every block and owner."""

    def __init__(self, memory: PeerMemory, rank: int, size: int) -> None:
        others = [(rank + step) % size for step in range(1, size)]
        after, blocks, ranks = (rank + 1) % size, range(MOST_BLOCKS), range(size)
        complete, read = MOST_BLOCKS * size, 2 * MOST_BLOCKS * size  # index of the first flag of a kind
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
        # Waiting for a flag resets it. After an interrupt a flag may be set that no rank has begun to wait for.
        self.lower = [
            FlagWrites([memory.flag(rank, kind + number) for number in range(MOST_BLOCKS * size)], 0)
            for kind in (0, complete)
        ]
        # The barrier after a call. A failed call uses another first, since two barriers of one kind must not follow
        # each other.
        self.read, self.failed = (
            StreamBarrier(
                [memory.flag(rank, kind + other) for other in others],
                [memory.flag(other, kind + rank) for other in others],
            )
            for kind in (read, read + size)
        )

    @staticmethod
    def needed(size: int) -> int:
        """Flags of every rank, in a group of `size`."""
        return (2 * MOST_BLOCKS + 2) * size
