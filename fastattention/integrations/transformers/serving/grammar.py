"""Constrains answers to JSON schemas and tool calls, by llguidance."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        return self._checked(functools.partial(LLMatcher.grammar_from_json_schema, schema), "response_format")

    def of_calls(self, lark: str) -> Grammar:
        """The grammar of tool calls, from llguidance's Lark. Raises RequestError (400) for schemas not served."""
        return self._checked(functools.partial(LLMatcher.grammar_from_lark, lark), "tools")

    def _checked(self, make: Callable[[], str], param: str) -> Grammar:
        try:
            tokenizer = self._make()  # takes a second, once
        except ValueError as error:
            raise RequestError(
                400, f"{param}: llguidance cannot read this model's tokenizer: {error}", param
            ) from error
        try:
            grammar = make()
            reason = LLMatcher.validate_grammar(grammar, tokenizer)
        except ValueError as error:
            reason = str(error)
        if reason:
            raise RequestError(400, f"{param}: the schema is not served: {reason}", param)
        return Grammar(LLMatcher(tokenizer, grammar), param)


class Grammar:
    """The state of one answer."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        """param: of the request that asks for it."""
        self._matcher, self.param = matcher, param

    def copy(self) -> Grammar:
        """The same state, for another answer."""
        return Grammar(self._matcher.deep_copy(), self.param)

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
