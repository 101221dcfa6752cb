"""Tokens after a prompt: called one by one with a cache that grows, or replayed from a CUDA graph with a static one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel, StaticCache

from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

_WARM_UP = 2  # steps in which libraries set up what must not be captured


def next_tokens(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """The likeliest tokens, (batch_size, 1), after `tokens` (batch_size, seqlen), which go into the cache."""
    logits: Tensor = model(tokens, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1).logits
    return logits.argmax(-1)


class GraphedDecode:
    """Decoding with a static cache, one CUDA graph for every step.

    Raises RuntimeError where the model cannot be captured.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, num_steps: int) -> None:
        """Reads `tokens` (batch_size, seqlen). The cache has room for num_steps more tokens than the capture takes."""
        # The cache lives as long as the graph, which works on its memory.
        self._cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + num_steps + _WARM_UP + 1)
        self._token = next_tokens(model, tokens, self._cache)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._forward(model)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._forward(model)

    def step(self) -> None:
        """Decodes one token for every sequence."""
        self._graph.replay()

    def _forward(self, model: PreTrainedModel) -> None:
        self._token.copy_(next_tokens(model, self._token, self._cache))


def stepper(model: PreTrainedModel, token: Tensor, cache: Cache) -> Callable[[], None]:
    """A function that adds a token to every sequence of a cache that grows."""
    newest = token.clone()

    def step() -> None:
        newest.copy_(next_tokens(model, newest, cache))

    return step
