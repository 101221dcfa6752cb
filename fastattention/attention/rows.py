"""Rows: the tokens of a batch of one length as varlen calls take them, and results in the layout of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.engine.checks import check_rank, spec_of


class Rows(NamedTuple):
    """Tokens of a varlen batch, or those of a batch of one length, concatenated."""

    rows: Tensor  # (total, heads, headdim)
    offsets: Tensor | None  # int32 (batch_size + 1,), as given; None for a batch of one length
    longest: int  # a bound of the longest sequence: finding it would synchronize
    batch: torch.Size | None  # (batch_size, seqlen) of a batch of one length

    @property
    def cu_seqlens(self) -> Tensor:
        """The offsets of sequences, int32 (batch_size + 1,), which a batch of one length computes anew."""
        if self.offsets is not None:
            return self.offsets
        assert self.batch is not None
        batch_size, seqlen = self.batch
        return torch.arange(batch_size + 1, dtype=torch.int32, device=self.rows.device) * seqlen

    def back(self, result: Any) -> Any:
        """Out, or (out, lse, None), of these queries in the layout in which they were given."""
        if self.batch is None or result is None:
            return result
        if isinstance(result, Tensor):
            return result.view(*self.batch, *result.shape[1:])
        out, lse, *rest = result
        return self.back(out), lse.view(-1, *self.batch).transpose(0, 1).contiguous(), *rest


def as_rows(name: str, tensor: Tensor, cu_seqlens: Tensor | None = None, longest: int | None = None) -> Rows:
    """Tokens as varlen calls take them.

    - `tensor`: (total, heads, headdim), or without cu_seqlens (batch_size, seqlen, heads, headdim)
    - `longest`: length of the longest sequence of cu_seqlens; None takes the total
    """
    spec = spec_of(name, tensor)
    if cu_seqlens is not None:
        check_rank(name, spec, "total, heads, headdim")
        return Rows(tensor, cu_seqlens, spec.shape[0] if longest is None else longest, None)
    check_rank(name, spec, "batch_size, seqlen, heads, headdim")
    batch = spec.shape[:2]
    return Rows(tensor.flatten(0, 1), None, batch[1], batch)
