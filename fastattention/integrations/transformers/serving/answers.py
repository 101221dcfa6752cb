"""Answers as OpenAI's API has them, whole and in pieces."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastattention.integrations.transformers.serving.engine import Piece
from fastattention.integrations.transformers.serving.sampling import TokenLogprob

Logprobs = list[tuple[TokenLogprob, int]]


@dataclass
class Answer:
    """One choice, as far as it has come."""

    text: str = ""
    logprobs: Logprobs = field(default_factory=list)
    tokens: int = 0
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        """Adds what a step has given."""
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.tokens += piece.tokens
        self.finish_reason = piece.finish_reason


class Writer:
    """Writes the answer to one request. A subclass knows an endpoint's form."""

    kind = chunk_kind = prefix = ""

    def __init__(self, model: str, word: Callable[[int], str], with_logprobs: bool) -> None:
        """word: the text of a token."""
        self._word, self._with_logprobs = word, with_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a request that is not streamed."""
        choices = [
            {"index": index, **self._content(one.text), "logprobs": self._reported(one.logprobs),
             "finish_reason": one.finish_reason}
            for index, one in enumerate(answers)
        ]  # fmt: skip
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        """The JSON of one event of a stream. first: of this choice."""
        choice = {"index": index, **self._delta(piece.text, first), "logprobs": self._reported(piece.logprobs),
                  "finish_reason": piece.finish_reason}  # fmt: skip
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last event of a stream, if its client has asked for it."""
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _reported(self, logprobs: Logprobs) -> dict[str, Any] | None:
        return self._form(logprobs) if self._with_logprobs else None

    def _content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _delta(self, text: str, first: bool) -> dict[str, Any]:
        raise NotImplementedError

    def _form(self, logprobs: Logprobs) -> dict[str, Any]:
        raise NotImplementedError


class CompletionWriter(Writer):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}

    def _form(self, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "tokens": [self._word(one.token) for one, _ in logprobs],
            "token_logprobs": [one.logprob for one, _ in logprobs],
            "top_logprobs": [{self._word(token): value for token, value in one.top} for one, _ in logprobs],
            "text_offset": [place for _, place in logprobs],
        }


class ChatWriter(Writer):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def _form(self, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "content": [
                {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*each) for each in one.top]}
                for one, _ in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        word = self._word(token)
        # A token may hold a part of a character, whose bytes its text does not tell.
        return {"token": word, "logprob": logprob, "bytes": None if "\ufffd" in word else list(word.encode())}


def usage(prompt_tokens: int, cached_tokens: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens of a request."""
    completion_tokens = sum(one.tokens for one in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
