"""cu_seqlens, the offsets of sequences that follow one another in a batch of 1: their checks, and what they say."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastattention import environment
from fastattention.engine.checks import TensorSpec, check_device, spec_of
from fastattention.errors import ArgumentError


def check_cu_seqlens(cu_seqlens: Tensor, of: TensorSpec, name: str = "q") -> int:
    """The number of sequences. of: the tensor (batch_size, seqlen, ...) called `name` that holds their tokens."""
    offsets = spec_of("cu_seqlens", cu_seqlens)
    if of.shape[0] != 1:
        raise ArgumentError(f"with cu_seqlens {name} must have batch_size 1, its sequences in a row, got {of.shape[0]}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"cu_seqlens must be int32 or int64, got {offsets.dtype}")
    if len(offsets.shape) != 1 or offsets.shape[0] < 1:
        raise ArgumentError(f"cu_seqlens must be (num_sequences + 1,), got shape {tuple(offsets.shape)}")
    check_device("cu_seqlens", offsets, of, name)
    check_offsets(cu_seqlens, of.shape[1])
    return offsets.shape[0] - 1


def check_offsets(cu_seqlens: Tensor, seqlen: int) -> None:
    """Raises unless the offsets rise from 0 to the number of tokens; on a CPU, elsewhere only when checks are on."""
    if not _are_checked(cu_seqlens):
        return
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != seqlen or any(b < a for a, b in itertools.pairwise(offsets)):
        raise ArgumentError(f"cu_seqlens={offsets} must rise from 0 to the number of tokens, {seqlen}")


def _are_checked(cu_seqlens: Tensor) -> bool:
    return not cu_seqlens.is_meta and (cu_seqlens.device.type == "cpu" or environment.check_numbers())


def join_offsets(rows: Tensor, seqlen: int) -> Tensor:
    """The offsets of the sequences of all rows, one row of `seqlen` tokens after the other.

    rows: (rows, num_sequences + 1)
    """
    moved = rows + seqlen * torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device).unsqueeze(1)
    if _are_checked(rows):
        # The next row would hide that one ends too early. -1 leaves it an error, without reading values here.
        wrong = (rows[:, :1] != 0) | (rows[:, -1:] != seqlen)
        moved = torch.cat([torch.where(wrong, -1, moved[:, :1]), moved[:, 1:]], dim=1)
    return torch.cat([moved[:, :-1].flatten(), moved[-1:, -1]])


def spans(batch_size: int, seqlen: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(row of the batch, first token, last token + 1) of every sequence. Reads cu_seqlens on its device."""
    if cu_seqlens is None:
        return [(batch, 0, seqlen) for batch in range(batch_size)]
    offsets = cu_seqlens.tolist()
    return [(0, first, last) for first, last in itertools.pairwise(offsets)]


def key_counts(
    used: Tensor | None, cu_seqlens: Tensor | None, batch_size: int, seqlen: int, device: torch.device
) -> Tensor:
    """Keys of each sequence that there are, int32 (batch_size,). seqlen: of all, where neither tensor is given."""
    if used is not None:
        return used
    if cu_seqlens is not None:
        return cu_seqlens.diff()
    return torch.full((batch_size,), seqlen, dtype=torch.int32, device=device)


def recheck_offsets(seqlen: int) -> Callable[[Any, object], Any]:
    """`Operator.recheck` of varlen calls with this many tokens: their offsets may differ from call to call."""

    def check(given: Any, _: object) -> Any:
        check_offsets(given.cu_seqlens, seqlen)
        return given

    return check
