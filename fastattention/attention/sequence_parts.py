"""Varlen calls over parts of sequences, as varlen calls whose sequences are the parts.

Used tokens (seqused_q, seqused_k) of a sequence are one part. Unused queries are a part without keys: rows without keys
give out 0 and lse -inf. Unused keys are a part without queries: no kernel reads them, and their gradients are 0. Pages
need no such part, because only the lengths of sequences say what is read of them.

Every backend serves such calls, with gradients. Offsets are computed on their device: nothing synchronizes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastattention.attention.problem import Inputs
from fastattention.attention.validation import lengths
from fastattention.attention.validation.prefill import check_varlen_shapes
from fastattention.engine.checks import check_index, spec_of
from fastattention.engine.eager import runs_eagerly


class SequenceParts(NamedTuple):
    """What a varlen call is given in place of its own arguments."""

    cu_seqlens_q: Tensor  # int32 (batch_size * per_sequence + 1,), the parts of a sequence side by side
    cu_seqlens_k: Tensor
    block_table: Tensor | None
    per_sequence: int  # parts of each sequence

    def of_each(self, tensor: Tensor | None, rank: int) -> Tensor | None:
        """`tensor`, repeated for the parts of each sequence where its first of `rank` axes is the batch."""
        batch_size = (self.cu_seqlens_q.shape[0] - 1) // self.per_sequence
        if not isinstance(tensor, Tensor) or tensor.dim() != rank or tensor.shape[0] != batch_size:
            return tensor
        return tensor.repeat_interleave(self.per_sequence, dim=0)


def used_parts(given: Inputs, seqused_q: Tensor | None, seqused_k: Tensor | None) -> SequenceParts:
    """The parts of a call of which only the first seqused_q and seqused_k tokens of each sequence are used.

    given: its cu_seqlens_k may be None where seqused_k has the lengths of paged sequences

    Raises ArgumentError for tensors of wrong shapes, and for lengths on the CPU that are not 0 to those of sequences.
    """
    paged = given.block_table is not None
    only_used = paged and seqused_k is not None and given.cu_seqlens_k is None
    check_varlen_shapes(given._replace(cu_seqlens_k=given.cu_seqlens_q) if only_used else given)
    _check_used(given, {"seqused_q": seqused_q, "seqused_k": seqused_k})
    tokens_q, tokens_k = (None if x is None else x.diff() for x in (given.cu_seqlens_q, given.cu_seqlens_k))
    used_q = tokens_q if seqused_q is None else seqused_q
    used_k = tokens_k if seqused_k is None else seqused_k
    assert tokens_q is not None
    assert used_q is not None
    assert used_k is not None
    no_tokens = torch.zeros_like(used_q)
    queries, keys = [used_q], [used_k]
    if seqused_q is not None:
        queries.append(tokens_q - used_q)
        keys.append(no_tokens)
    if seqused_k is not None and tokens_k is not None and not paged:
        queries.append(no_tokens)
        keys.append(tokens_k - used_k)
    table = None if given.block_table is None else given.block_table.repeat_interleave(len(keys), dim=0)
    return SequenceParts(_offsets(queries), _offsets(keys), table, len(keys))


def _offsets(columns: list[Tensor]) -> Tensor:
    """Offsets of parts from their lengths: each tensor, int32 (batch_size,), has those of one part of all sequences."""
    return F.pad(torch.stack(columns, dim=1).flatten().cumsum(0, dtype=torch.int32), (1, 0))


def _check_used(given: Inputs, used: dict[str, Tensor | None]) -> None:
    """Checks the lengths of used tokens, on the CPU their values too, and the pages that they are in."""
    cu_seqlens_q, cu_seqlens_k, table = given.cu_seqlens_q, given.cu_seqlens_k, given.block_table
    assert cu_seqlens_q is not None
    batch_size = cu_seqlens_q.shape[0] - 1
    for name, tensor in used.items():
        if tensor is not None:
            check_index(name, spec_of(name, tensor), spec_of("q", given.q), (batch_size,), "batch_size")
    if not (lengths.are_checked(given.q) and runs_eagerly(*given, *used.values())):
        return
    lengths.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, given.q.shape[0])
    tokens = {"seqused_q": cu_seqlens_q.diff().tolist()}
    if cu_seqlens_k is not None:
        lengths.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, given.k.shape[0] if table is None else None)
        tokens["seqused_k"] = cu_seqlens_k.diff().tolist()
    elif table is not None:
        tokens["seqused_k"] = [table.shape[1] * given.k.shape[1]] * batch_size
    for name, tensor in used.items():
        if tensor is not None:
            counts = tensor.tolist()
            lengths.check_used(name, counts, tokens[name])
            tokens[name] = counts
    if table is not None:
        lengths.check_block_table(table, tokens["seqused_k"], given.k.shape[1], given.k.shape[0])
