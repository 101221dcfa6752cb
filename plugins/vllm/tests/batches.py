"""Batches with tensors of vLLM's shapes, and layers that take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import attention
from torch import Tensor

from fastattention_vllm.metadata import PagedMetadata
from fastattention_vllm.options import QUANTIZED, LayerOptions
from fastattention_vllm.paged_attention import PagedAttention

# Kinds of layers: our class for CPUs; our class for GPUs, on CPU tensors; the computation of both on a GPU.
TARGETS = ("cpu", "gpu-class", "cuda")


@dataclass
class Batch:
    """Requests with cached and new tokens, and their pages. Unused memory of the cache is NaN."""

    query_lens: list[int]
    seq_lens: list[int]  # with the new tokens
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    page_padding: int = 0  # unused bytes after each block
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def __post_init__(self) -> None:
        shape = (sum(self.seq_lens), self.num_kv_heads, self.head_size)
        self.keys, self.values = (self._random(shape).split(self.seq_lens) for _ in range(2))
        self.query = self._random((sum(self.query_lens), self.num_heads, self.head_size))
        blocks = [-(-length // self.block_size) for length in self.seq_lens]
        # Block 0 is the null block, as in vLLM; the others are in random order, and some belong to no request.
        numbers = (torch.randperm(sum(blocks) + 3, generator=self.generator) + 1).tolist()
        self.tables = [[numbers.pop() for _ in range(count)] for count in blocks]
        self.kv_cache = self._poisoned_cache(sum(blocks) + 4)

    def slots(self, request: int) -> list[int]:
        """Slots of a request's tokens."""
        table = self.tables[request]
        return [
            table[i // self.block_size] * self.block_size + i % self.block_size for i in range(self.seq_lens[request])
        ]

    def fill(self, update_cache: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> None:
        """Writes all tokens: the cached ones in one call, the new ones in another with padding at its end."""
        for part in ("cached", "new"):
            keys, values, slots = [], [], []
            for request, query_len in enumerate(self.query_lens):
                first_new = self.seq_lens[request] - query_len
                tokens = slice(None, first_new) if part == "cached" else slice(first_new, None)
                keys.append(self.keys[request][tokens])
                values.append(self.values[request][tokens])
                slots += self.slots(request)[tokens]
            padding = self.keys[0].new_full((3, *self.keys[0].shape[1:]), torch.nan)
            key, value = torch.cat([*keys, padding]), torch.cat([*values, padding])
            qkv = torch.cat((torch.zeros_like(key), key, value), 2)  # views of one tensor, as vLLM's are
            slot_mapping = torch.tensor([*slots, -1, -1], device=self.device)  # and one row without a slot
            head_size = self.head_size
            update_cache(qkv[..., head_size : 2 * head_size], qkv[..., 2 * head_size :], self.kv_cache, slot_mapping)

    def common(self, causal: Any = True, **changes: Any) -> dict[str, Any]:
        """The fields of vLLM's CommonAttentionMetadata."""
        starts = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        width = max(map(len, self.tables)) + 1
        table = torch.full((len(self.tables), width), 999_999, dtype=torch.int32)  # no such block
        for row, numbers in zip(table, self.tables, strict=True):
            row[: len(numbers)] = torch.tensor(numbers)
        return {
            "query_start_loc": starts.to(self.device),
            "query_start_loc_cpu": starts,
            "seq_lens": torch.tensor(self.seq_lens, dtype=torch.int32, device=self.device),
            "num_reqs": len(self.query_lens),
            "num_actual_tokens": sum(self.query_lens),
            "max_query_len": max(self.query_lens),
            "max_seq_len": max(self.seq_lens) + 7,  # an upper bound only
            "block_table_tensor": table.to(self.device),
            "slot_mapping": torch.zeros(sum(self.query_lens), dtype=torch.int64, device=self.device),
            "causal": causal,
        } | changes

    def expected(self, dtype: torch.dtype, keys: Any = None, values: Any = None, **options: Any) -> Tensor:
        """Attention of all new tokens by the oracle; with other keys and values if given."""
        parts = zip(self.query.split(self.query_lens), keys or self.keys, values or self.values, strict=True)
        return torch.cat([attention(query, key, value, dtype, **options) for query, key, value in parts])

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def _poisoned_cache(self, num_blocks: int) -> Tensor:
        """The cache of one layer in layout LBHNC. Bytes of ones are NaN in every floating dtype."""
        stored = QUANTIZED.get(self.kv_cache_dtype)
        element = (stored or self.dtype).itemsize
        content = 2 * self.head_size * element + (8 if stored else 0)
        page = self.num_kv_heads * self.block_size * content
        memory = torch.full((num_blocks, page + self.page_padding), 255, dtype=torch.uint8, device=self.device)
        shape = (self.num_kv_heads, self.block_size, content // element)
        # vLLM's dtype of a float8 cache is uint8.
        allocated = torch.uint8 if stored is torch.float8_e4m3fn else stored or self.dtype
        return memory[:, :page].view(allocated).unflatten(1, shape)


@dataclass
class Layer:
    """One attention layer, called as vLLM calls it."""

    update_cache: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    forward: Callable[[Tensor, Tensor, dict[str, Any], Tensor], None]


def make_layer(target: str, batch: Batch, **options: Any) -> Layer:
    """A layer for `batch` of one of TARGETS, with options under vLLM's names."""
    arguments = {
        "num_heads": batch.num_heads,
        "head_size": batch.head_size,
        "num_kv_heads": batch.num_kv_heads,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": batch.kv_cache_dtype,
        "logits_soft_cap": None,
        "sinks": None,
    } | options
    if target == "cuda":
        with torch.device("cuda"):
            paged = PagedAttention(LayerOptions(dtype=batch.dtype, **arguments))
        return Layer(paged.update_cache, lambda q, cache, common, out: paged.attend(q, cache, made(common), out))
    impl, builder = make_vllm_classes(target, batch.dtype, arguments)

    def update_cache(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        impl.do_kv_cache_update(None, key, value, kv_cache, slot_mapping)

    def forward(query: Tensor, kv_cache: Tensor, common: dict[str, Any], output: Tensor) -> None:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        metadata = builder.build(0, CommonAttentionMetadata(**common))
        assert impl.forward(None, query, None, None, kv_cache, metadata, output) is output

    return Layer(update_cache, forward)


def make_vllm_classes(target: str, dtype: torch.dtype, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """(implementation, metadata builder) of our backend for CPUs or GPUs, made as vLLM makes them."""
    from fastattention_vllm.cpu import FastAttentionCpuBackend
    from fastattention_vllm.cuda import FastAttentionCudaBackend

    backend = FastAttentionCpuBackend if target == "cpu" else FastAttentionCudaBackend
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        impl = backend.get_impl_cls()(**arguments)
    finally:
        torch.set_default_dtype(before)
    return impl, backend.get_builder_cls()(None, [], None, torch.device("cpu"))


def made(common: dict[str, Any]) -> PagedMetadata:
    """Metadata without vLLM's classes."""
    from types import SimpleNamespace

    return PagedMetadata.from_common(SimpleNamespace(mm_req_doc_ranges=None, rswa_prefix_lens=None, **common))
