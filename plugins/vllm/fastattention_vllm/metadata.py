"""One batch, as vLLM describes it. All layers of a cache group share it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from fastattention import UnsupportedError
from torch import Tensor

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


@dataclass
class PagedMetadata:
    """Lengths and pages of a batch, under vLLM's names. Its new tokens are already in the cache when it is used."""

    num_actual_tokens: int  # new tokens of the batch, without padding
    max_query_len: int
    query_start_loc: Tensor  # int32 (num_reqs + 1,), offsets of each request's new tokens
    query_start_loc_cpu: Tensor  # the same in the host's memory
    max_seq_len: int  # an upper bound
    seq_lens: Tensor  # int32 (num_reqs,), tokens in the cache with the new ones
    block_table: Tensor  # int32 (num_reqs, max_blocks_per_req)
    slot_mapping: Tensor  # int64 (num_actual_tokens,), the place of each new token in the cache
    causal: bool

    @classmethod
    def from_common(cls, common: CommonAttentionMetadata) -> PagedMetadata:
        """The batch that vLLM describes by `common`.

        Raises UnsupportedError for masks that differ between requests: per-request causality, bidirectional ranges of
        multimodal prompts, and windows that keep a prefix visible.
        """
        if isinstance(common.causal, Tensor):
            raise UnsupportedError("causal is a tensor, one value a request; fastattention takes one for the batch")
        if common.mm_req_doc_ranges:
            raise UnsupportedError(
                "mm_req_doc_ranges asks for bidirectional attention within multimodal ranges; fastattention does not "
                "serve it. FASTATTENTION_VLLM=0 uses vLLM's own attention"
            )
        if common.rswa_prefix_lens is not None:
            raise UnsupportedError(
                "rswa_prefix_lens asks for reference sliding-window attention; fastattention does not serve it. "
                "FASTATTENTION_VLLM=0 uses vLLM's own attention"
            )
        return cls(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )

    @property
    def is_decode(self) -> bool:
        """True when every request has exactly one new token."""
        return self.max_query_len == 1 and self.num_actual_tokens == self.seq_lens.shape[0]

    @cached_property
    def cu_seqlens_k(self) -> Tensor:
        """int32 (num_reqs + 1,): offsets of the requests' cached tokens, as if they were concatenated."""
        return F.pad(self.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def requests_by_query_len(self) -> dict[int, Tensor]:
        """Indices of the requests with n new tokens, int64 on the batch's device, by n; without n = 0."""
        query_lens = self.query_start_loc_cpu.diff()
        return {
            length: (query_lens == length).nonzero().squeeze(1).to(self.seq_lens.device)
            for length in sorted({*query_lens.tolist()} - {0})
        }
