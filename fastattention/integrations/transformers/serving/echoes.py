"""Prompts that come back before the answer, with their log probabilities if these are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from fastattention.integrations.transformers.serving.sampling import LEAST_LOGPROB, TokenLogprob, likeliest
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT

CHUNK = 256  # tokens of a prompt whose logits are held at a time; the batch goes on between two chunks


@dataclass(frozen=True)
class Echo:
    """A prompt as text."""

    text: str
    places: Sequence[int] | None = None  # where the text of each token begins; None: no log probabilities


class PromptLogprobs:
    """Computes the log probabilities of a prompt's tokens, chunk by chunk. The keys and values are thrown away."""

    def __init__(self, model: Any, prompt: Sequence[int], top: int) -> None:
        """top: alternatives to report with each token."""
        self._model, self._prompt, self._top = model, prompt, top
        self._cache = DynamicCache(config=model.config)
        self._read = 0
        self.found = [TokenLogprob(prompt[0], None, [])]  # nothing comes before the first

    def read_chunk(self) -> bool:
        """Reads a chunk of the prompt. Returns whether it was the last."""
        start, end = self._read, min(self._read + CHUNK, len(self._prompt))
        tokens = torch.tensor([self._prompt[start:end]], dtype=torch.int64, device=self._model.device)
        logits = self._model(tokens, **{CACHE_ARGUMENT: self._cache}, use_cache=True).logits[0]
        following = self._prompt[start + 1 : end + 1]
        values = logits[: len(following)].float().log_softmax(-1).clamp(min=LEAST_LOGPROB)
        self.found += [likeliest(token, row, self._top) for token, row in zip(following, values, strict=True)]
        self._read = end
        return end == len(self._prompt)
