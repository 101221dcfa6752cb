"""Generation with separate times for the prompt and for decoding. Importing this module imports Transformers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel, TextStreamer

from fastattention.cli.model_folder import LoadedModel
from fastattention.errors import ArgumentError
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from fastattention.offload.memory import PREFILL_CHUNK

if TYPE_CHECKING:
    from fastattention.integrations.transformers.cache import FastAttentionCache


@dataclass(frozen=True)
class Generated:
    """New tokens, and the times of prefill and decoding."""

    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float  # until the first new token
    decode_seconds: float  # all tokens after the first

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens over the time to the first new one."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first; None when there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class Events:
    """Callbacks while generation runs."""

    prefill: Callable[[float], None] = lambda fraction: None  # fraction of the prompt's layers done, 0 to 1
    token: Callable[[int], None] = lambda count: None  # number of new tokens so far
    text: Callable[[str], None] = lambda text: None  # new text, as soon as whole words are there


class _Clock(TextStreamer):
    """A streamer, which Transformers calls with the prompt and then with each token."""

    def __init__(self, loaded: LoadedModel, events: Events) -> None:
        super().__init__(loaded.codec, skip_prompt=True)  # type: ignore[arg-type]  # needs no more than decode()
        self._events = events
        self.tokens: list[int] = []
        self.times: list[float] = []  # when the prompt came, then each token

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.tokens += value.tolist()
            self._events.token(len(self.tokens))
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._events.text(text)


def generate_tokens(
    loaded: LoadedModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    min_new_tokens: int = 0,
    temperature: float = 0.0,
    cache: FastAttentionCache | None = None,
    events: Events | None = None,
) -> Generated:
    """Continue `prompt`, int64 (1, seqlen). temperature 0 always takes the likeliest token.

    With a cache, long prompts are read in chunks, so that activations stay small.

    Raises ArgumentError for an empty prompt and for more tokens than the model has positions.
    """
    events = events or Events()
    _check_length(loaded.model, prompt.shape[1], max_new_tokens)
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling["temperature"] = temperature
    end = loaded.model.generation_config.eos_token_id
    clock = _Clock(loaded, events)
    prompt = prompt.to(loaded.model.device)
    if cache is not None:
        sampling |= {CACHE_ARGUMENT: cache, "prefill_chunk_size": PREFILL_CHUNK}
    num_chunks = 1 if cache is None else -(-prompt.shape[1] // PREFILL_CHUNK)
    with torch.inference_mode(), _watched_layers(loaded.model, num_chunks, events.prefill):
        loaded.model.generate(  # type: ignore[operator]
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            pad_token_id=end[0] if isinstance(end, list) else end,
            streamer=clock,
            **sampling,
        )
    start, first, last = clock.times[0], clock.times[1], clock.times[-1]
    return Generated(clock.tokens, prompt.shape[1], first - start, last - first)


def _check_length(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    if prompt_tokens == 0:
        raise ArgumentError("the prompt is empty; give at least one token")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt_tokens + max_new_tokens > positions:
        raise ArgumentError(
            f"{prompt_tokens} tokens of prompt and {max_new_tokens} new ones are more than the "
            f"{positions} positions of the model"
        )


@contextmanager
def _watched_layers(model: PreTrainedModel, num_chunks: int, on_prefill: Callable[[float], None]) -> Iterator[None]:
    """Tells `on_prefill` after each layer, once through the model for each chunk: the prompt passes first."""
    # Without a known number of layers nothing is reported.
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", -1)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers)
    handles: list[RemovableHandle] = []
    done = itertools.count(1)

    def remove_hooks() -> None:
        for handle in handles:
            handle.remove()

    def hook(*_: object) -> None:
        count = next(done)
        on_prefill(count / (num_layers * num_chunks))
        if count == num_layers * num_chunks:
            remove_hooks()

    handles += [layer.register_forward_hook(hook) for layer in next(lists, [])]
    try:
        yield
    finally:
        remove_hooks()
