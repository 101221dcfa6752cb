"""Answers as OpenAI's API has them, whole and in pieces."""

from __future__ import annotations

import collections
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastattention.integrations.transformers.serving.engine import Piece
from fastattention.integrations.transformers.serving.errors import RequestError
from fastattention.integrations.transformers.serving.protocol import StreamOptions
from fastattention.integrations.transformers.serving.sampling import TokenLogprob
from fastattention.integrations.transformers.serving.tools import Call, CallReader

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
    """Writes the answers to one request, whole or as a stream of server-sent events."""

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a request that is not streamed."""
        raise NotImplementedError

    def opening(self) -> Iterator[str]:
        """Events before all others."""
        return iter(())

    def chunk(self, index: int, piece: Piece, usage: Callable[[], dict[str, Any]]) -> Iterator[str]:
        """Events of a piece of one choice."""
        raise NotImplementedError

    def closing(self, answers: Sequence[Answer], usage: dict[str, Any]) -> Iterator[str]:
        """Events after all others."""
        raise NotImplementedError

    def failure(self, error: RequestError) -> str:
        """The last event of a stream that fails."""
        return event(error.body())


class ChoiceWriter(Writer):
    """Writes a list of choices. A subclass knows an endpoint's form."""

    kind = chunk_kind = prefix = ""

    def __init__(
        self, model: str, word: Callable[[int], str], with_logprobs: bool, options: StreamOptions | None
    ) -> None:
        """word: the text of a token."""
        self._word, self._with_logprobs, self._options = word, with_logprobs, options or StreamOptions()
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a request that is not streamed."""
        choices = [
            {"index": index, "logprobs": self._reported(one.logprobs), "finish_reason": one.finish_reason,
             **self._content(index, one)}
            for index, one in enumerate(answers)
        ]  # fmt: skip
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def chunk(self, index: int, piece: Piece, usage: Callable[[], dict[str, Any]]) -> Iterator[str]:
        """An event of a piece of one choice, if it holds anything."""
        content = self._delta(index, piece)
        if content is None:
            return
        choice = {"index": index, "logprobs": self._reported(piece.logprobs), "finish_reason": piece.finish_reason,
                  **content}  # fmt: skip
        body = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self._options.include_usage:
            body["usage"] = usage() if self._options.continuous_usage_stats else None
        yield event(body)

    def closing(self, answers: Sequence[Answer], usage: dict[str, Any]) -> Iterator[str]:
        """The usage, if it was asked for, and the end."""
        if self._options.include_usage:
            yield event({**self._head, "object": self.chunk_kind, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def _reported(self, logprobs: Logprobs) -> dict[str, Any] | None:
        return self._form(logprobs) if self._with_logprobs else None

    def _content(self, index: int, answer: Answer) -> dict[str, Any]:
        """A choice's fields that hold what was generated, and its finish_reason where that is another."""
        raise NotImplementedError

    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """`_content` of a piece. None: nothing to send."""
        raise NotImplementedError

    def _form(self, logprobs: Logprobs) -> dict[str, Any]:
        raise NotImplementedError


class CompletionWriter(ChoiceWriter):
    """/v1/completions."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def _content(self, index: int, answer: Answer) -> dict[str, Any]:
        return {"text": answer.text}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        return {"text": piece.text} if piece.text or piece.logprobs or piece.finish_reason is not None else None

    def _form(self, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "tokens": [self._word(one.token) for one, _ in logprobs],
            "token_logprobs": [one.logprob for one, _ in logprobs],
            "top_logprobs": [
                None if one.logprob is None else {self._word(token): value for token, value in one.top}
                for one, _ in logprobs
            ],
            "text_offset": [place for _, place in logprobs],
        }


class ChatWriter(ChoiceWriter):
    """/v1/chat/completions."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        word: Callable[[int], str],
        with_logprobs: bool,
        options: StreamOptions | None,
        reader: Callable[[], CallReader] | None,
    ) -> None:
        """reader: makes what finds tool calls in a choice; None leaves them in the text."""
        super().__init__(model, word, with_logprobs, options)
        self._readers = None if reader is None else collections.defaultdict[int, CallReader](reader)  # by choice
        self._calls: collections.Counter[int] = collections.Counter()
        self._begun: set[int] = set()

    def _content(self, index: int, answer: Answer) -> dict[str, Any]:
        text, calls = self._read(index, answer.text, last=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if not calls:
            return {"message": message}
        message["content"] = text if text.strip() else None
        message["tool_calls"] = [one.described() for one in calls]
        return {"message": message, **_ended_by_calls(answer.finish_reason)}

    def _delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        last = piece.finish_reason is not None
        text, calls = self._read(index, piece.text, last)
        first = self._calls[index]
        self._calls[index] += len(calls)
        delta: dict[str, Any] = {} if index in self._begun else {"role": "assistant"}
        if text or not calls:
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [{"index": at, **one.described()} for at, one in enumerate(calls, start=first)]
        if not (text or calls or piece.logprobs or last):
            return None
        self._begun.add(index)
        return {"delta": delta, **(_ended_by_calls(piece.finish_reason) if self._calls[index] else {})}

    def _read(self, index: int, text: str, last: bool) -> tuple[str, list[Call]]:
        return (text, []) if self._readers is None else self._readers[index].push(text, last)

    def _form(self, logprobs: Logprobs) -> dict[str, Any]:
        return {
            "content": [
                {**self._token(one.token, one.logprob), "top_logprobs": [self._token(*each) for each in one.top]}
                for one, _ in logprobs
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        word = self._word(token)
        # A token may hold a part of a character, whose bytes its text does not tell.
        return {"token": word, "logprob": logprob, "bytes": None if "\ufffd" in word else list(word.encode())}


def _ended_by_calls(finish_reason: str | None) -> dict[str, Any]:
    return {"finish_reason": "tool_calls"} if finish_reason == "stop" else {}


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
