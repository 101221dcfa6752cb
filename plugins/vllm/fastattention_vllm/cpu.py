"""vLLM's three classes on CPUs. They replace vLLM's own CPU_ATTN.

Encoders, encoder-only models and cross-attention stay with vLLM's implementation, which ours inherits from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder, AttentionType, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec, KVCacheSpec

from fastattention_vllm.backend import FastAttentionBackend, make_paged_attention, run_attention
from fastattention_vllm.metadata import PagedMetadata


def _is_left_to_vllm(kv_cache_spec: KVCacheSpec | None) -> bool:
    """True for cache groups of encoders and cross-attention."""
    return isinstance(kv_cache_spec, (CrossAttentionSpec, EncoderOnlyAttentionSpec))


class FastAttentionCpuImpl(CPUAttentionBackendImpl):
    """One attention layer on a CPU."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.paged = None
        if attn_type != AttentionType.DECODER:
            super().__init__(
                num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype,
                logits_soft_cap, attn_type, kv_sharing_target_layer_name, sinks,
            )  # fmt: skip
            return
        # vLLM's constructor is not called: it refuses options that only its own kernels lack.
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.kv_cache_dtype, self.attn_type = float(scale), kv_cache_dtype, attn_type
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.paged = make_paged_attention(
            num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window, kv_cache_dtype, logits_soft_cap,
            sinks,
        )  # fmt: skip

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Stores new keys and values. Shapes: `PagedAttention.update_cache`."""
        if self.paged is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        else:
            self.paged.update_cache(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of a batch to output and returns it. Shapes: `PagedAttention.attend`."""
        if self.paged is None:
            out: Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
            return out
        return run_attention(self.paged, query, kv_cache, attn_metadata, output, output_scale, output_block_scale)


class FastAttentionCpuMetadataBuilder(CPUAttentionMetadataBuilder):
    """Metadata of a batch: ours for decoders, vLLM's for encoders and cross-attention."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        if _is_left_to_vllm(kv_cache_spec):
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        else:  # vLLM's constructor chooses an instruction set, and refuses head sizes that its kernels lack
            AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """PagedMetadata, or vLLM's CPUAttentionMetadata. Raises UnsupportedError as PagedMetadata.from_common does."""
        if _is_left_to_vllm(self.kv_cache_spec):
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        return PagedMetadata.from_common(common_attn_metadata)


class FastAttentionCpuBackend(FastAttentionBackend, CPUAttentionBackend):
    """The backend that vLLM knows as CPU_ATTN. Some models of vLLM accept only subclasses of its own CPU backend.

    From that it inherits only the supported attention types: we serve decoders, and vLLM's implementation all others.
    """

    @staticmethod
    def get_name() -> str:
        """The name that this backend replaces."""
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[FastAttentionCpuImpl]:
        """The class of a layer's attention."""
        return FastAttentionCpuImpl

    @staticmethod
    def get_builder_cls() -> type[FastAttentionCpuMetadataBuilder]:
        """The class that makes a batch's metadata."""
        return FastAttentionCpuMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Any multiple of 16; for encoders and cross-attention, those of vLLM's kernels."""
        if _is_left_to_vllm(kv_cache_spec):
            return CPUAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
        return FastAttentionBackend.get_supported_kernel_block_sizes(kv_cache_spec)
