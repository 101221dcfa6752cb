"""A Llama of random weights whose tokenizer knows the words t3, t4, ...: for servers, which take text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def save_word_model(folder: Path, vocab_size: int, **shape: int | float) -> None:
    """Writes the model and its tokenizer to `folder`; `shape`: arguments of LlamaConfig."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"t{token}": token for token in range(3, vocab_size)}}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
        **shape,  # type: ignore[arg-type]
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def words(tokens: list[int]) -> str:
    """The text of some tokens."""
    return " ".join(f"t{token}" for token in tokens)
