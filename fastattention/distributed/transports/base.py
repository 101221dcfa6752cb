"""Transport: computes this rank's part of a sum block by block, and sums the blocks over the ranks of a group."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from fastattention.distributed.row_partitions import Recipe


class Compute(Protocol):
    """A function that computes this rank's part of a sum, for some rows."""

    def __call__(self, start: int, stop: int, partial: Tensor, *, adds: bool = False) -> None:
        """Writes rows [start, stop) to `partial` (stop - start, hidden), or adds them to what it holds."""


class Transfer(NamedTuple):
    """The sum that a call needs, without the values."""

    rows: int
    hidden: int
    dtype: torch.dtype
    device: torch.device
    num_blocks: int = 1  # blocks that the caller has asked for

    @property
    def nbytes(self) -> int:
        """Bytes of all rows on one rank."""
        return self.rows * self.hidden * self.dtype.itemsize


class Transport(abc.ABC):
    """Sums over one group. It holds its own communicator, streams and memory.

    Every rank of the group makes it at the same point of the program, and then calls it in the same order. Making one
    is cheap and succeeds on any group: `why_not` says what it cannot serve, and memory is taken at the first use. It
    keeps no reference to the user's group, and ends with it.
    """

    name: ClassVar[str]
    recipes: ClassVar[tuple[Recipe, ...]] = ()  # partitions to try, besides all rows in one block

    @abc.abstractmethod
    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Makes a transport for the ranks of `group` and tensors on `device`."""

    @abc.abstractmethod
    def why_not(self, transfer: Transfer) -> str | None:
        """Why this transport cannot serve `transfer`, or None. The answer is the same on every rank."""

    def attention_rows(self, rows: tuple[int, ...]) -> tuple[int, ...]:
        """Rows of each call of attention, for blocks that the caller gives; () where `run` asks block by block."""
        return ()

    def reserve(self, nbytes: int) -> None:
        """Takes the memory that a call of `nbytes` needs, if it is not there. Collective.

        A graph can then capture the call, even if another transport has served it eagerly.
        """
        return

    @abc.abstractmethod
    def run(self, compute: Compute, out: Tensor, rows: tuple[int, ...]) -> None:
        """Fills `out` with the sum over all ranks of the results of `compute`, block by block.

        out: contiguous (rows, hidden)
        rows: the rows of each block; the same on every rank

        It waits for every sum that has begun, even after an error, and then raises the first error.
        """

    def release(self) -> None:
        """Frees the memory that no graph uses; the next call takes it anew. Collective, between calls."""
        return

    def close(self) -> None:
        """Releases everything that the transport holds, once the user's group is gone."""
        return
