"""vLLM's three classes on NVIDIA GPUs, as the backend CUSTOM.

Not run inside vLLM: tested with tensors of vLLM's shapes only.
"""

from __future__ import annotations

from typing import Any

from fastattention import UnsupportedError
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from fastattention_vllm.backend import (
    FastAttentionBackend,
    FastAttentionMetadataBuilder,
    make_paged_attention,
    run_attention,
)
from fastattention_vllm.metadata import PagedMetadata


class FastAttentionCudaImpl(AttentionImpl[Any]):
    """One attention layer on an NVIDIA GPU. Not run inside vLLM."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if attn_type != AttentionType.DECODER:
            raise UnsupportedError(
                f"attn_type={attn_type!r} is not supported on GPUs; allowed is {AttentionType.DECODER.value!r}. "
                "Choose another attention backend for encoders and cross-attention"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.paged = make_paged_attention(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            sinks,
        )  # fmt: skip

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores new keys and values. Shapes: `PagedAttention.update_cache`."""
        self.paged.update_cache(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagedMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of a batch to output and returns it. Shapes: `PagedAttention.attend`."""
        return run_attention(self.paged, query, kv_cache, attn_metadata, output, output_scale, output_block_scale)


class FastAttentionCudaBackend(FastAttentionBackend):
    """The backend CUSTOM of vLLM. Its builder keeps vLLM's default for CUDA graphs: attention runs outside them."""

    @staticmethod
    def get_name() -> str:
        """The name under which users choose this backend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FastAttentionCudaImpl]:
        """The class of a layer's attention."""
        return FastAttentionCudaImpl

    @staticmethod
    def get_builder_cls() -> type[FastAttentionMetadataBuilder]:
        """The class that makes a batch's metadata."""
        return FastAttentionMetadataBuilder
