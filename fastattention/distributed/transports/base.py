"""Transport: computes this rank's part of a sum block by block, and sums the blocks over the ranks of a group."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.distributed.row_partitions import Recipe


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
    num_blocks: int = 1  # that the caller has asked for

    @property
    def nbytes(self) -> int:
        """Bytes of all rows on one rank."""
        return self.rows * self.hidden * self.dtype.itemsize


class Transport(abc.ABC):
    """Sums over one group. It holds its own communicator, streams and memory.

    Every rank of the group makes it at the same point of the program, and then calls it in the same order. Making one
    is cheap and succeeds on any group: what a transport cannot serve, `why_not` says, and memory is taken at the first
    use. It keeps no reference to the user's group, whose end is its own end.
    """

    name: ClassVar[str]
    recipes: ClassVar[tuple[Recipe, ...]] = ()  # partitions to try, beside all rows in one block

    @abc.abstractmethod
    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """For the ranks of `group` and tensors on `device`."""

    @abc.abstractmethod
    def why_not(self, transfer: Transfer) -> str | None:
        """Why this transport cannot serve `transfer`, or None. The answer is the same on every rank."""

    def attention_rows(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of which attention is computed at once, where blocks are given; () where `run` asks block by block."""
        return ()

    def reserve(self, nbytes: int) -> None:
        """Takes the memory that a call of so many bytes needs, if it is not there. Collective.

        A graph can capture the call then, though another transport has served it.
        """
        return

    @abc.abstractmethod
    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        """Fills `out` with the sum over all ranks of what `compute` gives, block by block.

        out: contiguous (rows, hidden)
        rows: of each block; the same on every rank

        Every sum that has begun is waited for, also when something fails; then the first error is raised.
        """

    def release(self) -> None:
        """Gives back the memory that no graph uses; the next call takes it anew. All ranks do, between calls."""
        return

    def close(self) -> None:
        """Releases what the transport holds, once the user's group is gone."""
        return
