"""Transport: who sums rows over the ranks of a group."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


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

    def release(self) -> None:
        """Gives back the memory that no graph uses; the next call takes it anew. All ranks do, between calls."""
        return

    def close(self) -> None:
        """Releases what the transport holds, once the user's group is gone."""
        return
