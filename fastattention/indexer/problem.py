"""IndexerProblem: everything about one call of the indexer except its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class IndexerProblem:
    """A validated call. Hashable, so that the choice of a backend and the plan of a call can be kept."""

    total_q: int
    batch_size: int
    seqlen_q: int  # of every sequence; 0 with cu_seqlens_q
    nheads: int
    headdim: int
    k_rows: int  # rows of k, or pages; 1 when sequences lie one after another
    k_seqlen: int  # tokens of each of them
    most_keys: int  # a bound of the tokens of a sequence
    paged: bool
    topk: int
    causal: bool
    dtype: torch.dtype  # of q and k
    device: torch.device
    weights_dtype: torch.dtype  # as given; backends get weights in float32
    in_transform: bool = False  # torch.func or forward-mode differentiation follows the call
    grads: tuple[str, ...] = ()  # indices have no gradients

    @property
    def axes(self) -> str:
        """The sizes of the call by the names of their axes."""
        return ", ".join(f"{name}={getattr(self, name)}" for name in ("total_q", "nheads", "headdim", "topk"))

    @property
    def out_shape(self) -> tuple[int, int]:
        """(total_q, topk)."""
        return self.total_q, self.topk


class IndexerInputs(NamedTuple):
    """The tensors of a call. Backends get last axes that are contiguous, weights in float32, and int32 offsets."""

    q: Tensor  # (total_q, nheads, headdim)
    k: Tensor  # (k_rows, k_seqlen, headdim)
    weights: Tensor  # (total_q, nheads)
    cu_seqlens_q: Tensor | None = None  # (batch_size + 1,); None: all sequences have seqlen_q queries
    cu_seqlens_k: Tensor | None = None  # (batch_size + 1,)
    seqused_k: Tensor | None = None  # (batch_size,)
    block_table: Tensor | None = None  # (batch_size, max_blocks_per_seq)


class IndexerOutput(NamedTuple):
    """The result of a backend."""

    indices: Tensor  # int32 (total_q, topk)
