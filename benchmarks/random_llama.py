"""Transformers' own Llama in the shape of a preset, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastattention.offload.model_shape import ModelShape


def random_llama(
    shape: ModelShape, seqlen: int, attn_implementation: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """A model for sequences of up to `seqlen` tokens, ready to generate."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.nheads, num_key_value_heads=shape.nheads_k,
        max_position_embeddings=seqlen,
    )  # fmt: skip
    with device:
        model = LlamaForCausalLM._from_config(config, attn_implementation=attn_implementation, dtype=dtype)  # type: ignore[no-untyped-call]
    return model.eval()
