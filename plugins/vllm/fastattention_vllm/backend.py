"""What our backends report to vLLM, on CPUs and GPUs alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from fastattention import UnsupportedError
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from fastattention_vllm.layout import BLOCK_SIZE_MULTIPLE, SCALE_BYTES
from fastattention_vllm.metadata import PagedMetadata
from fastattention_vllm.options import DTYPES, KV_CACHE_DTYPES, MAX_HEAD_SIZE, LayerOptions
from fastattention_vllm.paged_attention import PagedAttention


class FastAttentionBackend(AttentionBackend):
    """The common part of both backends."""

    supported_dtypes: ClassVar[list[torch.dtype]] = list(DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(KV_CACHE_DTYPES)
    forward_includes_kv_cache_update: bool = False  # vLLM calls do_kv_cache_update before forward

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """All head sizes up to 512."""
        return list(range(1, MAX_HEAD_SIZE + 1))

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Any multiple of 16."""
        return [MultipleOf(BLOCK_SIZE_MULTIPLE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Each block of a head contiguous, as layout.py needs it."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Adds the bytes of a quantized cache's scales: one float32 a token and head for keys, one for values."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        content = spec.head_size + spec.head_size_v + 2 * SCALE_BYTES  # a byte an element
        return replace(spec, state_content_bytes=content)

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """The names of options.py; None means the model's dtype."""
        return kv_cache_dtype is None or kv_cache_dtype in KV_CACHE_DTYPES

    @classmethod
    def supports_sink(cls) -> bool:
        """Attention sinks, as in GPT-OSS."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Sliding windows, of one layer or of all."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """A decoder without a causal mask, if that holds for the whole batch."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """False, because quantized caches are read by the host's query lengths."""
        return False


class FastAttentionMetadataBuilder(AttentionMetadataBuilder[PagedMetadata]):
    """Makes PagedMetadata once a batch and cache group."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedMetadata:
        """The batch, for all layers of the group. Raises UnsupportedError as PagedMetadata.from_common does."""
        return PagedMetadata.from_common(common_attn_metadata)


def make_paged_attention(
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int | None,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    kv_cache_dtype: str,
    logits_soft_cap: float | None,
    sinks: Tensor | None,
) -> PagedAttention:
    """The attention of a layer from the arguments that vLLM makes it with. Raises as LayerOptions does."""
    options = LayerOptions(
        num_heads=num_heads,
        head_size=head_size,
        scale=float(scale),
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        alibi_slopes=alibi_slopes,
        sliding_window=sliding_window,
        kv_cache_dtype=kv_cache_dtype,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dtype=torch.get_default_dtype(),  # the model's, while vLLM makes its layers
    )
    return PagedAttention(options)


def run_attention(
    paged: PagedAttention,
    query: Tensor,
    kv_cache: Tensor,
    metadata: PagedMetadata | None,
    output: Tensor,
    output_scale: Tensor | None,
    output_block_scale: Tensor | None,
) -> Tensor:
    """The forward of both implementations, for decoders.

    - `metadata`: None when vLLM warms up or measures memory; output is then zeros
    - `output_scale`, `output_block_scale`: must be None

    Returns output. Raises UnsupportedError for fused quantization of the output, and as PagedAttention.attend does.
    """
    for name, scale in (("output_scale", output_scale), ("output_block_scale", output_block_scale)):
        if scale is not None:
            raise UnsupportedError(f"{name} is given; fused quantization of the output is not supported, pass None")
    if metadata is None:
        return output.zero_()
    paged.attend(query, kv_cache, metadata, output)
    return output
