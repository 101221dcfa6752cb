"""Tokens after a prompt: called one by one with a cache that grows, or replayed from a CUDA graph with a static one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

_WARM_UP = 2  # steps, in which libraries set up what a graph must not hold


def prefill(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """The likeliest next tokens, (batch_size, 1), after `tokens` (batch_size, seqlen), which fill the cache."""
    logits = forward(model, tokens, cache)
    return logits[:, -1:].argmax(-1)


def forward(model: PreTrainedModel, tokens: Tensor, cache: Cache) -> Tensor:
    """Logits of the last token, (batch_size, 1, vocab_size)."""
    logits = model(tokens, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1).logits
    assert isinstance(logits, Tensor)
    return logits


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """An empty one that grows."""
    return DynamicCache(config=model.config)


class GraphedDecode:
    """Decoding with a static cache, one CUDA graph for every step.

    Raises RuntimeError where the model cannot be captured.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tensor, num_steps: int) -> None:
        """Reads `tokens` (batch_size, seqlen), and has room for num_steps more than it takes to capture."""
        # As long as the graph, which works on its memory.
        self._cache = StaticCache(config=model.config, max_cache_len=tokens.shape[1] + num_steps + _WARM_UP + 1)
        self._token = prefill(model, tokens, self._cache)
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
        """One token for every sequence."""
        self._graph.replay()

    def _forward(self, model: PreTrainedModel) -> None:
        self._token.copy_(forward(model, self._token, self._cache).argmax(-1))


def stepper(model: PreTrainedModel, token: Tensor, cache: Cache) -> Callable[[], None]:
    """A function that adds a token to every sequence of a cache that grows."""
    newest = token.clone()

    def step() -> None:
        newest.copy_(forward(model, newest, cache).argmax(-1))

    return step
