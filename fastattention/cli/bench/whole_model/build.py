"""A model of Transformers with random weights, in a named shape or in that of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Starcoder2Config,
)

import fastattention.integrations.transformers  # noqa: F401  # registers fast_attention
from fastattention.cli.console import first_line
from fastattention.cli.model_folder import read_config
from fastattention.errors import ArgumentError
from fastattention.offload.model_shape import PRESETS, ModelShape


def find_config(name: str, num_layers: int | None, longest: int) -> PretrainedConfig:
    """The configuration of a model for sequences of up to `longest` tokens.

    name: a preset, followed by "/8" for one of eight tensor-parallel ranks; or a folder with a config.json. num_layers:
        None for as many as it has. Raises ArgumentError for another name, and for more layers than it has.
    """
    config = _stored(Path(name)) if Path(name).is_dir() else config_of(find_shape(name), longest)
    if num_layers is not None:
        if num_layers > config.num_hidden_layers:
            raise ArgumentError(f"layers={num_layers} is more than the {config.num_hidden_layers} of {name}")
        config.num_hidden_layers = num_layers
    return config


def build(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model with weights as its class draws them. Nothing is read or downloaded."""
    try:
        with device:
            made: Any = AutoModelForCausalLM
            model = made.from_config(config, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:  # an encoder, or a class that Transformers does not have
        raise ArgumentError(f"model_type={config.model_type!r} generates no text: {first_line(error)}") from error
    return model.eval()  # type: ignore[no-any-return]


def find_shape(name: str) -> ModelShape:
    """A preset, or one rank's share of it. Raises ArgumentError for other names."""
    preset, _, ranks = name.partition("/")
    if preset not in PRESETS or (ranks and not ranks.isdigit()):
        choices = ", ".join(PRESETS)
        raise ArgumentError(
            f"model={name!r} is neither a folder nor known; choose from {choices}, with /8 for one rank of eight"
        )
    shape = PRESETS[preset]
    try:
        return shape.sharded(int(ranks)) if ranks else shape
    except ArgumentError as error:
        raise ArgumentError(f"model={name!r} is no share of a rank: {error}") from error


def config_of(shape: ModelShape, longest: int) -> PretrainedConfig:
    """A configuration for up to `longest` tokens: Llama, or Starcoder2 for a shape without a gated MLP."""
    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.nheads,
        "num_key_value_heads": shape.nheads_k,
        "head_dim": shape.headdim,
        "max_position_embeddings": longest,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    if shape.gated_mlp:
        return LlamaConfig(**sizes)
    return Starcoder2Config(**sizes, use_bias=False)


def _stored(folder: Path) -> PretrainedConfig:
    config = read_config(folder)
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise ArgumentError(f"model {str(folder)!r} has no num_hidden_layers: it is no language model alone")
    return config
