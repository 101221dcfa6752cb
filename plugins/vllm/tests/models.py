"""Tiny models with random weights: folders that vLLM loads, and Transformers' eager attention to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

VOCAB_SIZE = 256
WINDOW = 40  # shorter than most prompts, and no multiple of a block

_SPECIAL: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}
_SHARED: dict[str, Any] = {
    **_SPECIAL,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # larger than usual, so that tokens depend on attention
    "tie_word_embeddings": False,
}


def _config(**changes: Any) -> dict[str, Any]:
    return {**_SHARED, **changes}


CONFIGS = {
    "llama": LlamaConfig(**_SHARED),
    "llama_head24": LlamaConfig(**_config(hidden_size=96, head_dim=24, initializer_range=0.2)),
    "mistral": MistralConfig(**_config(sliding_window=WINDOW)),
    "gemma2": Gemma2Config(
        **_config(tie_word_embeddings=True, head_dim=64, sliding_window=WINDOW),
        query_pre_attn_scalar=64,
        attn_logit_softcapping=5.0,
    ),
    "qwen3": Qwen3Config(**_config(head_dim=64)),
    "gpt_oss": GptOssConfig(
        **_config(head_dim=64, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2),
        layer_types=["sliding_attention", "full_attention"],
    ),
    "bert": BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.15,
        architectures=["BertModel"],
    ),
    "bloom": BloomConfig(**_SPECIAL, hidden_size=256, n_layer=2, n_head=4, initializer_range=0.15),
}


def save_model(name: str, folder: Path) -> Path:
    """A folder with the model `name` of CONFIGS in float32, and a tokenizer of VOCAB_SIZE words."""
    torch.manual_seed(0)
    factory = AutoModel if name == "bert" else AutoModelForCausalLM
    model = factory.from_config(CONFIGS[name], attn_implementation="eager", dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):  # as large as the scores, because smaller ones would change no token
            torch.nn.init.normal_(parameter, std=2.0)
        if (
            name == "gemma2" and ".post_" in parameter_name
        ):  # otherwise its tied embeddings make it repeat the last token
            torch.nn.init.constant_(parameter, 8.0)
    model.save_pretrained(folder)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def eager_model(folder: Path, cache_dtype: torch.dtype | None = None) -> Any:
    """The folder's model with Transformers' eager attention in float32.

    - `cache_dtype`: None, or int8 or float8_e4m3fn: keys and values are rounded as in a quantized cache
    """
    name = "eager" if cache_dtype is None else f"eager_{cache_dtype}"
    if cache_dtype is not None:

        def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
            key, value = (rounded(x, cache_dtype) for x in (key, value))
            return eager_attention_forward(module, query, key, value, *args, **kwargs)

        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, eager_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.config._attn_implementation = name
    return model


def rounded(x: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """x (..., head_size) as read from a quantized cache with a scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True) / {torch.int8: 127, torch.float8_e4m3fn: 448}[cache_dtype]
    stored = (x / scale).nan_to_num()
    return (stored.round() if cache_dtype is torch.int8 else stored.to(cache_dtype).float()) * scale


def eager_tokens(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt."""
    tokens = []
    for prompt in prompts:
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens.append(generated[0, len(prompt) :].tolist())
    return tokens


@torch.no_grad()
def eager_logprobs(model: Any, prompts: list[list[int]]) -> Tensor:
    """Log-probability of every token of each prompt but its first, concatenated."""
    logprobs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        logprobs.append(scores.gather(1, ids[0, 1:, None]).squeeze(1))
    return torch.cat(logprobs)
