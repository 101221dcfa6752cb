"""The computation of a layer: writes new tokens to vLLM's cache, and attends to all tokens of the cache."""

from __future__ import annotations

from typing import Any

import torch
from fastattention import ArgumentError, UnsupportedError, fast_attn_varlen_func, fast_attn_with_kvcache
from torch import Tensor

from fastattention_vllm.layout import CachePages, cache_pages
from fastattention_vllm.metadata import PagedMetadata
from fastattention_vllm.options import LayerOptions


class PagedAttention:
    """Decoder attention of one layer over vLLM's paged cache, on any device.

    - `kv_cache` of both methods: (num_blocks, num_kv_heads, block_size, content), see layout.py
    """

    def __init__(self, options: LayerOptions) -> None:
        self.options = options
        # vLLM makes layers with the model's device as torch's default one.
        slopes = options.alibi_slopes
        self._alibi_slopes = None if slopes is None else torch.tensor(slopes, dtype=torch.float32)

    def update_cache(self, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Stores new tokens in the cache, in place.

        - `key`, `value`: (num_tokens, num_kv_heads, head_size), any strides; rows past slot_mapping are padding
        - `slot_mapping`: int64, block * block_size + place within it; -1 for padding
        """
        num_tokens = slot_mapping.shape[0]
        self._pages(kv_cache).write(key[:num_tokens], value[:num_tokens], slot_mapping)

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: PagedMetadata, output: Tensor) -> None:
        """Writes the attention of a batch's new tokens to `output`; rows past num_actual_tokens are not written.

        - `query`, `output`: (num_tokens, num_heads, head_size), any strides

        Raises ArgumentError when the dtypes of query and cache do not fit the layer, and UnsupportedError for ALiBi
        without a causal mask: vLLM and fastattention define it differently for keys after a query.
        """
        if query.dtype is not self.options.dtype:
            raise ArgumentError(f"query has dtype {query.dtype}; the layer was made for {self.options.dtype}")
        if self._alibi_slopes is not None and not metadata.causal:
            raise UnsupportedError("alibi_slopes with causal=False is not supported; use causal=True")
        if metadata.num_actual_tokens == 0:
            return
        num_tokens = metadata.num_actual_tokens
        query, output = query[:num_tokens], output[:num_tokens]
        pages = self._pages(kv_cache)
        shared = self._shared_arguments(metadata.causal)
        if pages.k_scale is not None:
            _attend_quantized(query, pages, metadata, output, shared)
        elif metadata.is_decode:
            q = query.unsqueeze(1)  # (num_reqs, 1, num_heads, head_size)
            out = fast_attn_with_kvcache(
                q, pages.k, pages.v, cache_seqlens=metadata.seq_lens, block_table=metadata.block_table, **shared
            )
            output.copy_(out.squeeze(1))
        else:
            out = fast_attn_varlen_func(
                query, pages.k, pages.v, metadata.query_start_loc, metadata.cu_seqlens_k, metadata.max_query_len,
                metadata.max_seq_len, block_table=metadata.block_table, **shared,
            )  # fmt: skip
            output.copy_(out)

    def _pages(self, kv_cache: Tensor) -> CachePages:
        quantized_dtype = self.options.quantized_dtype
        if quantized_dtype is None and kv_cache.dtype is not self.options.dtype:
            raise ArgumentError(f"kv_cache has dtype {kv_cache.dtype}; the layer was made for {self.options.dtype}")
        return cache_pages(kv_cache, self.options.head_size, quantized_dtype)

    def _shared_arguments(self, causal: bool) -> dict[str, Any]:
        """Arguments of both functions of fastattention."""
        window = self.options.sliding_window
        # vLLM counts the query's own token. Without a causal mask its windows reach as far to the right.
        window_size = (-1, -1) if window is None else (window - 1, 0 if causal else window - 1)
        return {
            "softmax_scale": self.options.scale,
            "causal": causal,
            "window_size": window_size,
            "softcap": self.options.logits_soft_cap or 0.0,
            "alibi_slopes": self._alibi_slopes,
            "sinks": self.options.sinks,
        }


def _attend_quantized(
    query: Tensor, pages: CachePages, metadata: PagedMetadata, output: Tensor, shared: dict[str, Any]
) -> None:
    """Attends to a quantized cache. Only fast_attn_with_kvcache takes scales, for one number of new tokens.

    So there is a call for every number of new tokens: one for all decoding requests, and usually one for each prompt.
    """
    for query_len, requests in metadata.requests_by_query_len.items():
        first = metadata.query_start_loc[requests]
        tokens = first[:, None] + torch.arange(query_len, device=query.device)  # (len(requests), query_len)
        output[tokens] = fast_attn_with_kvcache(
            query[tokens], pages.k, pages.v, cache_seqlens=metadata.seq_lens[requests],
            block_table=metadata.block_table[requests], k_scale=pages.k_scale, v_scale=pages.v_scale, **shared,
        )  # fmt: skip
