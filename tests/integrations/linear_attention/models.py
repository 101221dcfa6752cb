"""Tiny random models with linear layers, one for each model type that is tested as a whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tiers import slow
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from integrations.models import VOCABULARY, sharpen

# One model of each rule is tested every time, the others with all tests.
NAMES = [
    *("qwen3_next", "kimi_linear", "bamba"),
    *(pytest.param(name, marks=slow) for name in ("qwen3_5", "olmo_hybrid")),
    *(pytest.param(name, marks=slow) for name in ("mamba2", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2")),
]
LENGTH = 75  # more than a chunk of 64
NUM_LINEAR = 2  # layers
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {
    **{name: size for name, size in _SIZES.items() if name != "layer_types" and not name.startswith("linear_")},
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_SIZES, **_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5": _SIZES,
    # No groups of heads; beta is up to 2.
    "olmo_hybrid": {**_SIZES, "linear_num_value_heads": 2, "linear_allow_neg_eigval": True},
    # Kimi delta attention, with a gate for every key dimension, and latent attention.
    "kimi_linear": {
        **{name: size for name, size in _SIZES.items() if not name.startswith("linear_") and name != "head_dim"},
        "linear_head_dim": 24, "linear_num_heads": 3, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 16, "num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 3,
    },
    # Mamba-2, with heads in groups.
    "mamba2": {
        **_MAMBA, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0,
        "shared_intermediate_size": 32,
    },
    "falcon_h1": {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 128},
    "nemotron_h": {
        **_MAMBA, "layer_types": ["mamba", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 24,
    },
    "zamba2": {
        **_MAMBA, "num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8,
        "mamba_ngroups": 2, "num_key_value_heads": 4, "adapter_rank": 8,
    },
}  # fmt: skip


def initial_model(name: str, **changed: Any) -> Any:
    """A model with weights as its class draws them, in eval mode."""
    config = CONFIG_MAPPING["qwen3_5_text" if name == "qwen3_5" else name](**_CONFIGS[name] | changed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def model_with(name: str, **changed: Any) -> Any:
    """A model with weights so large that every layer matters."""
    model = initial_model(name, **changed)
    sharpen(model)
    return model


@functools.cache
def model_of(name: str) -> Any:
    """Shared by all tests: leave it as it is."""
    return model_with(name)
