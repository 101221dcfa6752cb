"""SelectionProblem: everything about one call of a selection except its tensors.

A query has `topk` indices for all heads, or for each key head. An index names a block of `key_block` keys within the
query's sequence, -1 none. Keys behind the end of the sequence are dropped, and with `causal` those behind the query.
The others become slots, in the order of the indices:

    slot = token * token_step + head * head_step
    token = sequence * row_step + key                                      in rows of a batch
          = cu_seqlens_k[sequence] + key                                   in sequences one after another
          = block_table[sequence, key // k_seqlen] * row_step + key % k_seqlen  in pages
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class SelectionProblem:
    """A validated call. Hashable, so that the choice of a backend and the plan of a call can be kept."""

    total_q: int
    heads: int  # sets of indices of a query
    topk: int
    batch_size: int
    seqlen_q: int  # of every sequence; 0 with cu_seqlens_q
    k_seqlen: int  # tokens of a row of keys, or of a page
    most_keys: int  # a bound of the tokens of a sequence
    key_block: int
    causal: bool
    row_step: int
    token_step: int
    head_step: int
    device: torch.device
    dtype: torch.dtype  # of indices, int32 or int64
    in_transform: bool = False  # torch.func or forward-mode differentiation follows the call
    grads: tuple[str, ...] = ()  # slots have no gradients

    @property
    def width(self) -> int:
        """Keys that a set of indices names, at most."""
        return self.topk * self.key_block

    @property
    def num_sets(self) -> int:
        """Sets of indices in all."""
        return self.total_q * self.heads


class SelectionInputs(NamedTuple):
    """The tensors of a call. Backends get contiguous ones, of int32 but for indices."""

    indices: Tensor  # (total_q, heads, topk)
    cu_seqlens_q: Tensor | None = None  # (batch_size + 1,); None: all sequences have seqlen_q queries
    cu_seqlens_k: Tensor | None = None  # (batch_size + 1,)
    seqused_k: Tensor | None = None  # (batch_size,)
    block_table: Tensor | None = None  # (batch_size, max_blocks_per_seq)


class SelectionOutput(NamedTuple):
    """The result of a backend."""

    slots: Tensor  # int32 (num_sets, width): the first `counts` of each row; then anything that is a slot, such as 0
    counts: Tensor  # int32 (num_sets,)
