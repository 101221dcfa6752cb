"""Transport: who sums rows over the ranks of a group."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.distributed.products import products_leave_free


class Compute(Protocol):
    """This rank's part of a sum, rows by rows."""

    def __call__(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        """Writes rows [start, stop) to `partial` (stop - start, hidden), or adds them to what it holds."""


class Transfer(NamedTuple):
    """What a call asks to have summed, apart from the numbers."""

    rows: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of all rows on one rank."""
        return self.rows * self.hidden * self.dtype.itemsize


class Room(NamedTuple):
    """What sums have of a GPU to themselves while later blocks are computed."""

    ctas: int = 0  # of the transport's own kernel, if it has one
    left_free: int = 0  # multiprocessors that matrix products leave to sums


class Pending(abc.ABC):
    """A sum that has begun. It keeps alive the memory it uses."""

    def advance(self) -> None:
        """Does what a sum needs of the current stream on its way. Called once more of the compute is enqueued."""
        return

    @abc.abstractmethod
    def wait(self) -> None:
        """Has the current stream wait for the sum; on the CPU, the caller. Raises what the collective raised."""


class Transport(abc.ABC):
    """Sums over one group. It holds its own communicator, streams and memory.

    Every rank of the group makes it at the same point of the program, and then calls it in the same order. Making one
    is cheap and succeeds on any group: what a transport cannot serve, `why_not` says, and memory is taken at the first
    use. It keeps no reference to the user's group, whose end is its own end.
    """

    name: ClassVar[str]
    asks_for_shares: ClassVar[bool] = False  # of a block one after the other, and others in between
    rooms: tuple[Room, ...] = (Room(),)  # a call is made with one of them; the same on every rank

    @abc.abstractmethod
    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """For the ranks of `group` and tensors on `device`."""

    @abc.abstractmethod
    def why_not(self, transfer: Transfer) -> str | None:
        """Why this transport cannot serve `transfer`, or None. The answer is the same on every rank."""

    def reserve(self, nbytes: int, largest_block: int) -> None:
        """Takes what a call of so many bytes needs, in blocks of so many at most, if it is not there. Collective.

        A graph can capture the call then, though another transport has served it.
        """
        return

    @abc.abstractmethod
    def run(self, compute: Compute, out: Tensor, rows: Sequence[int], room: int = 0) -> None:
        """Fills `out` with the sum over all ranks of what `compute` gives, block by block.

        out: contiguous (rows, hidden).
        rows: of each block; the same on every rank.
        room: which of `rooms` the sums have; likewise.

        Every sum that has begun is waited for, also when something fails; then the first error is raised.
        """

    def release(self) -> None:
        """Gives back the memory that no graph uses; the next call takes it anew. All ranks do, between calls."""
        return

    def close(self) -> None:
        """Releases what the transport holds, once the user's group is gone."""
        return


class BlockTransport(Transport):
    """One that sums what has been computed, whatever it is: while a block is summed, the next one is computed."""

    def run(self, compute: Compute, out: Tensor, rows: Sequence[int], room: int = 0) -> None:
        """One block is computed, then summed."""
        partials = self.begin(out, rows, room)
        if len(rows) == 1:
            compute(0, rows[0], partials)
            self.all_reduce_now(partials, out)
            return
        pending: list[Pending] = []
        first_error: BaseException | None = None
        try:
            start = 0
            for count in rows:
                stop = start + count
                with products_leave_free(self.rooms[room].left_free if pending else 0, out.device):
                    compute(start, stop, partials[start:stop])
                pending.append(self.all_reduce(partials[start:stop], out[start:stop]))
                for before in pending[-2:-1]:
                    before.advance()
                start = stop
        except BaseException as error:
            first_error = error
        for each in pending:
            try:
                each.wait()
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    @abc.abstractmethod
    def begin(self, out: Tensor, rows: Sequence[int], room: int = 0) -> Tensor:
        """Begins a call that sums into `out` (rows, hidden), in blocks of so many rows.

        room: which of `rooms` it has.
        Returns memory like `out` for this rank's parts: `out` itself, or memory that peers read.
        """

    @abc.abstractmethod
    def all_reduce(self, partial: Tensor, out: Tensor) -> Pending:
        """Begins to sum `partial` (rows, hidden) over all ranks into `out`, once the current stream has computed it.

        Both are the next block of the call that has begun: of its `out`, and of the memory for its parts.
        """

    def all_reduce_now(self, partial: Tensor, out: Tensor) -> None:
        """The same with nothing to overlap: what follows on the current stream finds the sum in `out`."""
        self.all_reduce(partial, out).wait()
