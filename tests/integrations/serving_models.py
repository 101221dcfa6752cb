"""Small models with tokenizers, and the services of them that tests share."""

from __future__ import annotations

import asyncio
import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from word_model import save_word_model

from fastattention.integrations.transformers.serving.app import Limits, Service
from fastattention.integrations.transformers.serving.server import Settings, load
from integrations.asgi import Reply, call

VOCABULARY, POSITIONS = 200, 512
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "initializer_range": 0.5,
}  # fmt: skip
KEY = "a-key"
TOOLS_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content or message.tool_calls | tojson }} {% endfor %}"
)


class Served(NamedTuple):
    """A service in this process, and the eager model of the same weights."""

    service: Service
    eager: Any

    def ask(self, path: str, body: Any = None, **options: Any) -> Reply:
        """The reply to one request."""
        return asyncio.run(call(self.service.app(), path, body, **options))

    def ask_all(self, path: str, bodies: list[Any]) -> list[Reply]:
        """The replies to requests at the same time."""

        async def together() -> list[Reply]:
            app = self.service.app()
            return list(await asyncio.gather(*(call(app, path, body) for body in bodies)))

        return asyncio.run(together())

    def complete(self, prompt: Any, **body: Any) -> Any:
        """The JSON of a completion of 8 tokens, or as many as `body` says."""
        reply = self.ask("/v1/completions", {"prompt": prompt, "max_tokens": 8, **body})
        assert reply.status == 200, reply.body
        return reply.json

    def text(self, prompt: Any, **body: Any) -> str:
        """The text of the first choice."""
        return str(self.complete(prompt, **body)["choices"][0]["text"])

    def tokens(self, prompt: Any, **body: Any) -> list[int]:
        """The tokens of the first choice, of a model whose words are t3, t4, ..."""
        return [int(word[1:]) for word in self.text(prompt, **body).split()]

    def greedy(self, prompt: list[int], count: int = 8) -> list[int]:
        """The tokens that eager attention continues a prompt with."""
        return generated(self.eager, tuple(prompt), count)


@functools.cache
def generated(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    found: list[int] = model.generate(ids, max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()
    return found


def serve(folder: Path, kv_memory: int = 4 << 20, limits: Limits | None = None) -> Served:
    """A started service of the model in a folder."""
    settings = Settings(str(folder), "tiny", device="cpu", kv_memory=kv_memory, limits=limits or Limits())
    service = load(settings, print)
    service.engine.start()
    return Served(service, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())


def save_byte_model(folder: Path) -> None:
    """Writes a model whose tokens are bytes, and two marks of tool calls: characters beyond ASCII take several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    save_word_model(folder, len(letters) + 3, **SHAPE)
    saved = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TOOLS_TEMPLATE
    )
    saved.add_tokens([AddedToken("[TOOL_CALLS]", special=True), AddedToken("<tool_call>", special=False)])
    saved.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):  # the end token of the word model is a letter here
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": saved.eos_token_id}))


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of 3 to about 60 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (3 + 7 * one,), generator=generator).tolist() for one in range(count)]
