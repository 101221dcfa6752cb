"""Allocators that give pages to requests in continuous batching; attention reads these pages in place.

Transformers' own allocators list the row of every token for every step, and gather those rows in every layer. These
list pages. Layers with a sliding window keep pages in order too, not in a ring, and free those before the window.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator


class FullPages(FullAttentionCacheAllocator):
    """Pages of the layers that see all tokens: page i of a request holds its tokens from i * tokens_per_page on."""

    # The block table of the current forward pass, and in a step of one token each, the tokens before each new one.
    _table: Tensor
    _seqlens: Tensor
    # Whether pages are in host memory, while queries may be on a GPU. Then these, too, are of the current forward pass.
    in_host_memory = False
    _rows: Tensor
    _offsets_q: Tensor
    _lengths_k: Tensor

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Indices of the pages that hold the keys of the queries, in `get_cache_for_block_table`'s views."""
        pages = self._pages(request_id, past_length)
        stride = self.block_physical_stride // self.tokens_per_page
        return [
            stride * page for page in pages[: -(-self.get_seqlen_k(past_length, query_length) // self.tokens_per_page)]
        ]

    def fill_block_table(self, request_id: str, past_length: int, query_length: int, block_table: Tensor) -> None:
        """Writes the same indices to block_table, int32 (max_blocks,)."""
        pages = self.get_read_indices(request_id, past_length, query_length)
        entries = torch.tensor(pages, dtype=block_table.dtype, device="cpu")
        block_table[: len(pages)].copy_(entries, non_blocking=True)

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Does what Transformers' does, also if an asynchronous batch asks after the request was cancelled."""
        if request_id in self.block_table:
            super().mark_complete_blocks(request_id, token_ids, new_new_blocks)

    def most_pages(self, tokens: int, step: int) -> int:
        """Pages that a request of so many tokens holds at most, with `step` tokens of one pass."""
        return -(-tokens // self.tokens_per_page)

    def take_over(self, other: FullPages, request_id: str) -> None:
        """Takes what `other` knows of a request beside its pages, for one that moves to this cache."""

    def prepare(self, layer_idx: int, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> None:
        """Puts into kwargs what attention needs to read this layer's pages. Stores the tokens if attention does not.

        key, value: (1, nheads_k, total_q, headdim), the new tokens
        kwargs: Transformers' arguments of the forward pass; changed in place:
            cu_seq_lens_k, max_length_k: those of this layer
            k_cache, v_cache: (pages, page_size, nheads_k, headdim) views
            block_table: int32 (sequences, pages), or None where no query sees a token of an earlier pass
            cache_seqlens: int32 (sequences,), where attention appends the tokens, or None where they are stored
            in_host_memory: whether all of these are in host memory
            host_offsets_q, host_lengths_k: offsets of queries, and keys of each sequence; only in host memory, and
                where tokens are stored
        """
        kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][self.layer_type].to(torch.int32)
        kwargs["max_length_k"] = kwargs["max_length_k"][self.layer_type]
        k_pages, v_pages = self.get_cache_for_block_table(layer_idx)
        kwargs |= {"k_cache": k_pages, "v_cache": v_pages, "cache_seqlens": None, "in_host_memory": self.in_host_memory}
        first = layer_idx == self.layer_indices[0]  # its table serves the other layers, also where a graph is captured
        if kwargs.get("block_table") is not None:
            if first:
                found = self._one_token_each(kwargs["block_table"][self.index], kwargs)
                self._table, self._seqlens = (x.to(k_pages.device) for x in found)
            kwargs |= {"block_table": self._table, "cache_seqlens": self._seqlens}
            return
        if first:
            self._rows = kwargs["write_index"][self.index].to(k_pages.device)
        for pages, states in ((k_pages, key), (v_pages, value)):
            pages.flatten(0, 1).index_copy_(0, self._rows, states[0].transpose(0, 1).to(k_pages.device))
        numbers = kwargs["read_index"][self.index]
        if numbers.numel() > 0:
            if first:
                self._table = self._table_of(numbers, kwargs).to(k_pages.device)
            kwargs["block_table"] = self._table
        if self.in_host_memory:
            if first:
                self._offsets_q = kwargs["cu_seq_lens_q"].to(k_pages.device)
                self._lengths_k = kwargs["cu_seq_lens_k"].diff().to(k_pages.device)
            kwargs |= {"host_offsets_q": self._offsets_q, "host_lengths_k": self._lengths_k}

    def _one_token_each(self, table: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """The block table, and the tokens before each new one. Padding sequences write to a page that is never read."""
        seqlens = kwargs["cu_seq_lens_k"].diff()
        unused = self.write_trash_index // self.tokens_per_page
        return torch.where(seqlens[:, None] > 0, table, unused), (seqlens - 1).clamp_(min=0)

    def _table_of(self, numbers: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """The block table, a row for every sequence, from their concatenated page indices."""
        counts = (kwargs["cu_seq_lens_k"].diff() + (self.tokens_per_page - 1)) // self.tokens_per_page
        starts = counts.cumsum(0) - counts
        width = -(-kwargs["max_length_k"] // self.tokens_per_page)
        places = starts[:, None] + torch.arange(width, device=numbers.device)
        return numbers.to(torch.int32)[places.clamp_(max=numbers.numel() - 1)]  # entries past a sequence are not read

    def _pages(self, request_id: str, past_length: int) -> list[int]:
        """The pages of a request, from the first that a query after past_length tokens sees."""
        pages: list[int] = self.block_table[request_id]
        return pages


class SlidingPages(FullPages):
    """Pages of the layers with a sliding window: as `FullPages`, but pages that no query sees any more are freed.

    block_table[request_id] holds the pages of a request from page number _begins[request_id] on.
    """

    supports_block_sharing = False
    layer_type = "sliding_attention"

    def __init__(self, config: Any, **kwargs: Any) -> None:
        self.sliding_window: int = config.sliding_window
        super().__init__(config=config, **kwargs)
        self._begins: dict[str, int] = {}

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Keys from the first page in the window on."""
        return past_length + query_length - self._first(past_length) * self.tokens_per_page

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Pages to take, less those that will be freed."""
        released, taken = self._change(request_id, past_length, query_length)
        return max(0, taken - released)

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Frees the pages before the window, and takes those of the new tokens."""
        released, taken = self._change(request_id, past_length, query_length)
        begin = self._begin(request_id, past_length)
        pages = self.block_table.setdefault(request_id, [])
        self.pool.free_blocks(self.index, pages[:released])
        del pages[:released]
        pages.extend(self.pool.get_free_blocks(self.index, taken))
        self._begins[request_id] = begin + released

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Rows of the new tokens."""
        before = self._begins[request_id] * self.tokens_per_page
        rows: list[int] = super().get_write_indices(request_id, past_length - before, query_length)
        return rows

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Frees all pages. If a request is moved to host memory (no_cache), the number of its first page is kept."""
        if request_id in self.block_table and not no_cache:
            del self._begins[request_id]
        super().free_blocks(request_id, no_cache)

    def most_pages(self, tokens: int, step: int) -> int:
        """A request holds the pages of its window and of a pass. Both may begin and end within a page."""
        return super().most_pages(min(tokens, self.sliding_window + step + 2 * self.tokens_per_page), step)

    def take_over(self, other: FullPages, request_id: str) -> None:
        """Takes the number of the first page."""
        assert isinstance(other, SlidingPages)
        if request_id in other._begins:
            self._begins[request_id] = other._begins.pop(request_id)

    def fork_blocks(
        self, source_request_id: str, dest_request_id: str, past_length: int
    ) -> tuple[list[int], list[int]]:
        """Copies all pages: none is shared."""
        self._begins[dest_request_id] = self._begins[source_request_id]
        pairs: tuple[list[int], list[int]] = super().fork_blocks(source_request_id, dest_request_id, past_length)
        return pairs

    def _first(self, past_length: int) -> int:
        """The first page that is kept. It has one token more than the window: Transformers may take back a step."""
        return max(0, past_length - self.sliding_window) // self.tokens_per_page

    def _begin(self, request_id: str, past_length: int) -> int:
        """The first page number of a request without pages: that at its move to host memory, or 0."""
        if request_id in self.block_table or past_length > 0:
            return self._begins.get(request_id, 0)
        return 0

    def _change(self, request_id: str, past_length: int, query_length: int) -> tuple[int, int]:
        """The numbers of pages that a request frees and takes."""
        begin, held = self._begin(request_id, past_length), len(self.block_table.get(request_id, ()))
        released = min(self._first(past_length) - begin, held)
        end = -(-(past_length + query_length) // self.tokens_per_page)
        return released, max(0, end - begin - held)

    def _pages(self, request_id: str, past_length: int) -> list[int]:
        return self.block_table[request_id][self._first(past_length) - self._begins[request_id] :]


def allocators_of(cache: Any) -> dict[str, FullPages]:
    """The allocators of a paged cache of ours, by the type of their layers."""
    found: dict[str, FullPages] = cache.cache_allocators
    return found
