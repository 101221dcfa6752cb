"""Constrains answers to a JSON schema, by llguidance."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from torch import Tensor

from fastattention.integrations.transformers.serving.errors import RequestError


class Grammars:
    """Makes the grammars of a model's answers."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Sequence[int]) -> None:
        self._make = functools.cache(lambda: from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos)))

    def of_schema(self, schema: dict[str, Any]) -> Grammar:
        """The grammar of JSON values that a schema allows. Raises RequestError (400) for others."""
        try:
            tokenizer = self._make()  # takes a second, once
        except ValueError as error:
            message = f"response_format: llguidance cannot read this model's tokenizer: {error}"
            raise RequestError(400, message, "response_format") from error
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema)
            reason = LLMatcher.validate_grammar(grammar, tokenizer)
        except ValueError as error:
            reason = str(error)
        if reason:
            raise RequestError(400, f"response_format: the schema is not served: {reason}", "response_format")
        return Grammar(LLMatcher(tokenizer, grammar))


class Grammar:
    """The state of one answer."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Grammar:
        """The same state, for another answer."""
        return Grammar(self._matcher.deep_copy())

    def restrict(self, scores: Tensor) -> None:
        """Sets scores (vocab_size,) of tokens that may not come next to -inf."""
        allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        scores[: len(allowed)].masked_fill_(allowed.to(scores.device) == 0, -torch.inf)
        scores[len(allowed) :] = -torch.inf

    def accept(self, token: int) -> None:
        """Takes note of the token that was chosen."""
        self._matcher.consume_token(token)

    @property
    def error(self) -> str | None:
        """Why the grammar cannot go on, e.g. because it has become too large."""
        return str(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def complete(self) -> bool:
        """Whether the answer is whole, and nothing may follow."""
        return bool(self._matcher.is_stopped())
