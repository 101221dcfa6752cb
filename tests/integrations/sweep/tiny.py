"""A tiny random model of any type of Transformers, made from the type's default configuration."""

from __future__ import annotations

import copy
import inspect
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from integrations.models import VOCABULARY, sharpen

BATCH_SIZE, LENGTH = 3, 11
SECONDS = 30  # for one computation
LARGEST = 40_000_000  # most parameters of a tiny model
HEADS, HEADDIM = 4, 16
EXPERTS = {"experts_implementation": "eager"}  # which runs in float64

# A type's class comes from the first list that has it, with its kind of inputs.
LISTS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING": "decoder",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING": "encoder-decoder",
    "MODEL_FOR_MASKED_LM_MAPPING": "encoder",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING": "decoder",
    "MODEL_MAPPING": "base",
}

# Dimensions by the names that configurations have for them. Only those that are numbers in a default configuration are
# set, so that a name with another meaning does little harm. Configurations that fail with eager attention are tried in
# other ways.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WIDTHS = dict.fromkeys(
    (
        "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "embedding_size", "word_embed_proj_dim",
        "projection_dim", "out_hidden_size", "hidden_dim", "text_embed_dim", "encoder_hidden_size", "output_dim",
        "lm_hidden_size", "embedding_dim", "conv_hidden_size", "decoder_hidden_size", "cross_attention_hidden_size",
    ),
    HEADS * HEADDIM,
)  # fmt: skip
_DEPTHS = dict.fromkeys(
    (
        "num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "depth",
        "num_decoder_layers", "num_encoder_layers", "encoder_num_hidden_layers", "decoder_num_hidden_layers",
    ),
    2,
)  # fmt: skip
_HEADS = dict.fromkeys(
    (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
        "encoder_num_attention_heads", "decoder_num_attention_heads", "attention_heads", "num_query_heads",
    ),
    HEADS,
)  # fmt: skip
_INNER = dict.fromkeys(
    (
        "intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim",
        "ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
        "decoder_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp", "feed_forward_dim",
    ),
    96,
)  # fmt: skip
_HEADDIMS = {
    "head_dim": HEADDIM, "d_kv": HEADDIM, "attention_head_dim": HEADDIM, "kv_channels": HEADDIM, "head_size": HEADDIM,
    "v_head_dim": HEADDIM, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "q_lora_rank": 32,
    "kv_lora_rank": 16, "o_lora_rank": 16, "index_head_dim": HEADDIM, "global_head_dim": HEADDIM,
    "swa_head_dim": HEADDIM,
}  # fmt: skip
_OTHERS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "num_experts_per_token": 2, "moe_top_k": 2,
    "top_k_experts": 2, "n_shared_experts": 1, "sliding_window": 6, "attention_chunk_size": 6, "local_attention": 6,
    "index_n_heads": 24, "index_topk": 4, "image_size": 32, "patch_size": 8, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128,
    "mamba_chunk_size": 8, "chunk_size": 8, "mamba_d_state": 16, "ssm_state_size": 16, "state_size": 16,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_headdim": 16,
    "mamba_d_ssm": 128, "mamba_n_groups": 1, "n_groups": 1, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_heads": 4, "linear_head_dim": 16,
    "num_codebooks": 2, "num_mel_bins": 16,
    "max_source_positions": 64, "max_target_positions": 64,
}  # fmt: skip
_GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_global_key_value_heads")
_VOCABULARIES = (
    "vocab_size",
    "text_vocab_size",
    "decoder_vocab_size",
    "char_vocab_size",
    "audio_vocab_size",
    "entity_vocab_size",
)


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError after SECONDS."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# Settings that the sizes below cannot express, by type.
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    **{name: {"layer_types": ["conv", "full_attention"]} for name in ("lfm2", "lfm2_moe")},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE),
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "intermediate_size": [96, 96],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mamba2": {"num_heads": 8},
    "longcat_flash": {"num_attention_heads": 4, "head_dim": 8, "qk_head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}


class CannotBuildError(Exception):
    """A type has no tiny model: eager attention fails as well, or the sweep lacks its inputs."""


class Tiny(NamedTuple):
    """A tiny model, to be used with eager attention and with fast_attention."""

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    kind: str  # "decoder", "encoder-decoder", "encoder" or "base"
    eager: Any
    padding_token: int = 0  # where a mask has padding

    def inputs(self) -> dict[str, Tensor]:
        """The inputs of the model, without a mask."""
        return inputs_of(self.eager, self.kind)

    def fast(self) -> Any:
        """The model with fast_attention and the same weights."""
        torch.manual_seed(0)
        config = copy.deepcopy(self.config)
        model = self.model_class._from_config(config, attn_implementation="fast_attention", **EXPERTS).eval()
        model.load_state_dict(self.eager.state_dict())
        return model


def model_types() -> list[str]:
    """All types that have a model, decoders first."""
    return list(dict.fromkeys(name for mapping in LISTS for name in getattr(modeling_auto, f"{mapping}_NAMES")))


def build(model_type: str) -> Tiny:
    """The smallest model of a type that runs with eager attention. Raises CannotBuildError."""
    mapping = next(name for name in LISTS if model_type in getattr(modeling_auto, f"{name}_NAMES"))
    config_class = CONFIG_MAPPING[model_type]
    reasons: list[str] = []
    for sizes, nones in _attempts():
        try:
            with limited():
                return _attempt(mapping, _config(config_class, sizes, nones))
        except Exception as error:  # Transformers may raise anything; the next attempt uses another configuration
            reason = re.sub(r" from '[^']*'", "", " ".join(str(error).split()))  # the path of a module
            reasons.append(f"{type(error).__name__}: {reason}"[:160])
    raise CannotBuildError("; ".join(dict.fromkeys(reasons)))


def _attempt(mapping: str, config: PretrainedConfig) -> Tiny:
    model_class = getattr(modeling_auto, mapping)[type(config)]
    model_class = model_class[0] if isinstance(model_class, tuple) else model_class
    if not isinstance(config, model_class.config_class):  # the text part of a larger model
        config = config.get_text_config()
    with torch.device("meta"):
        count = sum(weight.numel() for weight in model_class._from_config(copy.deepcopy(config)).parameters())
    if count > LARGEST:
        raise CannotBuildError(f"{count / 1e6:.0f} million parameters")
    for scale in (True, False):
        tiny = Tiny(model_class, config, LISTS[mapping], _eager(model_class, config, scale))
        if _is_usable(tiny):
            return tiny
    raise CannotBuildError("eager attention gives no finite numbers")


def _eager(model_class: type[PreTrainedModel], config: PretrainedConfig, sharp: bool) -> Any:
    torch.manual_seed(0)
    model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager", **EXPERTS).eval()
    if sharp:
        sharpen(model)
    return model


def _is_usable(tiny: Tiny) -> bool:
    with torch.no_grad():
        outputs = tiny.eager(**tiny.inputs())
    found = floats(outputs)
    return bool(found) and all(bool(one.isfinite().all()) for one in found)


def floats(outputs: Any) -> list[Tensor]:
    """All floating-point tensors of a model's output that are not empty, caches left out."""
    if isinstance(outputs, Tensor):
        return [outputs] if outputs.is_floating_point() and outputs.numel() else []
    if isinstance(outputs, dict):
        return [one for value in outputs.values() for one in floats(value)]
    if isinstance(outputs, tuple | list):
        return [one for value in outputs for one in floats(value)]
    return []


def _attempts() -> Iterator[tuple[dict[str, int], bool]]:
    """Sizes to try, smallest first, and whether they replace default values of None too."""
    everything = {**_WIDTHS, **_INNER, **_HEADDIMS, **_OTHERS, **_HEADS, **_DEPTHS}
    yield everything, False
    yield {**everything, **dict.fromkeys(_GROUPS, 2)}, True
    yield {name: size for name, size in everything.items() if name not in _DEPTHS}, False
    yield {**everything, **dict.fromkeys(_WIDTHS, 256), **dict.fromkeys(_HEADDIMS, 64)}, False
    yield {**everything, **dict.fromkeys(_WIDTHS, 512), **dict.fromkeys(_HEADDIMS, 128)}, False
    yield {name: size for name, size in everything.items() if name not in (*_WIDTHS, *_HEADDIMS, *_HEADS)}, False
    yield {**_DEPTHS, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4}, False
    yield dict(_DEPTHS), False
    yield {}, False


def _config(config_class: type[PretrainedConfig], sizes: dict[str, int], nones: bool) -> PretrainedConfig:
    """A configuration with the sizes that it knows."""
    default = config_class()
    known = vars(default)
    changed: dict[str, Any] = {
        name: size
        for name, size in sizes.items()
        if name in known and _is_number(known[name], nones) and (known[name] is None or known[name] > size)
    }
    heads = next((known[name] for name in _HEADS if type(known.get(name)) is int), 0)
    for name in _GROUPS:
        if name in known and type(known[name]) is int and "num_attention_heads" in changed:
            changed[name] = HEADS if known[name] >= heads else min(known[name], 2)
    if sizes:
        changed |= {name: VOCABULARY for name in _VOCABULARIES if _is_number(known.get(name, ""), nones)}
    layer_types = known.get("layer_types")
    if known.get("attn_layer_indices") and "num_hidden_layers" in changed:
        changed["attn_layer_indices"] = [1]
    if layer_types and "num_hidden_layers" in changed:
        kinds = list(dict.fromkeys(layer_types))
        changed["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        changed["num_hidden_layers"] = len(changed["layer_types"])
    for name in config_class.sub_configs:
        if isinstance(part := known.get(name), PretrainedConfig):
            changed[name] = _config(type(part), sizes, nones).to_dict()
    return _with_tokens(config_class, changed | _MORE.get(config_class.model_type, {}))


def _is_number(value: object, nones: bool) -> bool:
    return type(value) is int or (nones and value is None)


def _with_tokens(config_class: type[PretrainedConfig], changed: dict[str, Any]) -> PretrainedConfig:
    """Special tokens within the vocabulary, and none that ends a text."""
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    try:
        return config_class(**changed, **tokens)
    except Exception:  # some want an integer, some do not know all of them
        return config_class(**changed)


def prompts(vocabulary: int) -> Tensor:
    """int64 (BATCH_SIZE, LENGTH), without special tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, min(vocabulary, VOCABULARY), (BATCH_SIZE, LENGTH), generator=generator)


def inputs_of(model: Any, kind: str) -> dict[str, Tensor]:
    """Random inputs by the name of the model's main one, e.g. input_ids."""
    name = model.main_input_name
    text = model.config.get_text_config()
    generator = torch.Generator().manual_seed(1)
    if name == "input_ids":
        given = {"input_ids": prompts(getattr(text, "vocab_size", VOCABULARY))}
        if kind == "encoder-decoder" or getattr(model.config, "is_encoder_decoder", False):
            given["decoder_input_ids"] = given["input_ids"][:, :6].flip(1)
        return given
    if name == "pixel_values":
        config = getattr(model.config, "vision_config", model.config)
        size = getattr(config, "image_size", 64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (BATCH_SIZE, getattr(config, "num_channels", 3), height, width)
        given = {name: torch.randn(shape, generator=generator)}
        if "input_ids" in inspect.signature(model.forward).parameters:
            given["input_ids"] = prompts(getattr(text, "vocab_size", VOCABULARY))
        return given
    if name == "input_values":
        return {name: torch.randn((2, 1600), generator=generator)}
    raise CannotBuildError(f"its main input is {name}")
