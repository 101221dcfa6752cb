"""Tiny random models, each with eager attention and with fast_attention, and the batches to try them on."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
    PreTrainedModel,
    StaticCache,
)

from fastattention.integrations.transformers import serve_linear_attention
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

VOCABULARY = 98
WINDOW = 6  # shorter than the prompts, so that windows matter
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
# Embeddings are untied: a tied model would repeat its last token.
_DECODER: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}
_WINDOWED = {**_DECODER, "sliding_window": WINDOW}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "tie_word_embeddings": False, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_INDEXER = {"index_topk": 6, "index_n_heads": 24, "index_head_dim": 16}  # with few heads scores of 0 would tie
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER,
    "qwen3": _DECODER,
    "mistral": _WINDOWED,  # of all layers
    # Every other layer has a window; all have a softcap, or sinks.
    "gemma2": {**_WINDOWED, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gpt_oss": {**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2, **_ROPE},
    "bert": _SIZES,
    # Layers with a window to both sides.
    "modernbert": {**_SIZES, "num_hidden_layers": 4, "cls_token_id": 1, "sep_token_id": 2, "local_attention": WINDOW},
    # Relative positions as a bias.
    "t5": {
        "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "eos_token_id": None,
    },
    # Latents; the last two select keys by an indexer.
    "deepseek_v3": {**_SIZES, **_LATENTS},
    "deepseek_v32": {**_SIZES, **_LATENTS, **_INDEXER},
    "glm_moe_dsa": {**_SIZES, **_LATENTS, **_INDEXER},
    # Each key head selects blocks of keys.
    "minimax_m3_vl_text": {
        **_DECODER, "head_dim": 16, "rotary_dim": 8, "layer_types": ["minimax_m3_sparse"] * 2, "index_n_heads": 2,
        "index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2, "num_local_experts": 4,
        "num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"], "shared_intermediate_size": 32,
        "dense_intermediate_size": 64,
    },
}  # fmt: skip

LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
DECODERS = ("llama", "gemma2", "gpt_oss", "mistral", "qwen3")
ENCODERS = ("bert", "modernbert")


def _config(name: str) -> Any:
    return CONFIG_MAPPING[name](**copy.deepcopy(_CONFIGS[name]))


class Pair(NamedTuple):
    """One model twice, with the same weights."""

    eager: Any
    fast: Any

    def __iter__(self) -> Any:
        return iter((self.eager, self.fast))


@functools.cache
def pair(name: str) -> Pair:
    """The models called `name`, in eval mode. Shared by all tests: do not change them."""
    eager = _random(name, _config(name), "eager")
    fast = type(eager)._from_config(_config(name), attn_implementation="fast_attention").eval()
    fast.load_state_dict(eager.state_dict())
    return Pair(eager, fast)


@functools.cache
def deep(name: str, num_layers: int) -> Any:
    """The decoder called `name` with more layers and fast_attention, in eval mode. Shared by all tests."""
    config = _config(name)
    config.num_hidden_layers = num_layers
    for kinds in ("layer_types", "mlp_layer_types"):
        if getattr(config, kinds, None):
            setattr(config, kinds, [getattr(config, kinds)[index % 2] for index in range(num_layers)])
    return _random(name, config, "fast_attention")


def _random(name: str, config: Any, implementation: str) -> Any:
    """A model in eval mode with the same weights after any tests; a router's biases are random, too."""
    auto = {"t5": AutoModelForSeq2SeqLM} | dict.fromkeys(ENCODERS, AutoModelForMaskedLM)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.get(name, AutoModelForCausalLM).from_config(config, attn_implementation=implementation).eval()
    sharpen(model)
    return model


def sharpen(model: nn.Module) -> None:
    """Makes weights so large that attention is far from uniform: otherwise a wrong mask would hardly show."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 or "sinks" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * (2.0 if "sinks" in name else 0.2))


def prompts(batch_size: int = 3, length: int = 11, seed: int = 0) -> Tensor:
    """int64 (batch_size, length), without special tokens."""
    return torch.randint(3, VOCABULARY, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def padding_mask(side: str, batch_size: int = 3, length: int = 11) -> Tensor:
    """int64 (batch_size, length): 1 is a token. side: "none", "left" or "right"; the first row is never padded."""
    mask = torch.ones(batch_size, length, dtype=torch.int64)
    for row, pad in ((1, 4), (2, 7)):
        if side == "left":
            mask[row, :pad] = 0
        elif side == "right":
            mask[row, -pad:] = 0
    return mask


def make_cache(kind: str, model: PreTrainedModel) -> Cache | None:
    """kind: "no cache", "dynamic" or "static" (with places to spare)."""
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=32) if kind == "static" else None


def stepwise(model: Any, side: str, cache: str) -> tuple[Tensor, Tensor]:
    """Logits of a prompt, then of a chunk of three tokens and of two single ones on its cache; the mask of them all."""
    ids, seen, past = prompts().to(model.device), padding_mask(side).to(model.device), make_cache(cache, model)
    logits = [model(ids, attention_mask=seen, **{CACHE_ARGUMENT: past}, use_cache=past is not None).logits]
    for count in (3, 1, 1) if past is not None else ():
        seen = F.pad(seen, (0, count), value=1)
        logits.append(model(ids[:, :count], attention_mask=seen, **{CACHE_ARGUMENT: past}).logits)
    return torch.cat(logits, dim=1), seen


@contextmanager
def own_linear_layers() -> Iterator[None]:
    """Models compute linear layers by functions of Transformers."""
    serve_linear_attention(False)
    try:
        yield
    finally:
        serve_linear_attention()


def greedy(model: Any, ids: Tensor, mask: Tensor | None = None, count: int = 8, cache: str | None = None) -> Any:
    """Prompts and the likeliest `count` tokens after each."""
    options = {"max_new_tokens": count, "do_sample": False, "cache_implementation": cache}
    return model.generate(ids, attention_mask=mask, **options).tolist()


def assert_varied(texts: list[list[int]], length: int = 11) -> None:
    """Otherwise that they are equal would mean little."""
    assert len({token for text in texts for token in text[length:]}) > 6


def random_masks() -> tuple[Tensor, Tensor]:
    """Bool (3, 1, 11, 11): which keys are seen, each query's own among them; and what is added to scores for that."""
    seen = torch.rand(3, 1, 11, 11, generator=torch.Generator().manual_seed(1)) < 0.4
    seen |= torch.eye(11, dtype=torch.bool)
    return seen, torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def assert_as_exact(fast: Tensor, eager: Tensor, exact: Tensor, real: Tensor) -> None:
    """At most twice the error of eager attention, on average over real tokens."""
    error, allowed = ((logits.float() - exact)[real.bool()].abs().mean().item() for logits in (fast, eager))
    assert 0 < error <= 2 * allowed


def assert_same(fast: Tensor, eager: Tensor, real: Tensor | None = None, tolerance: float = 1e-5) -> None:
    """Asserts a largest difference at real tokens of at most `tolerance` times the largest value."""
    assert fast.shape == eager.shape
    assert not fast.isnan().any()
    real = torch.ones(eager.shape[:2], dtype=torch.bool) if real is None else real.bool()
    difference = (fast - eager)[real].abs().max().item()
    scale = eager[real].abs().max().item()
    assert difference <= tolerance * scale, f"largest difference {difference:.2e}, largest number {scale:.2e}"
