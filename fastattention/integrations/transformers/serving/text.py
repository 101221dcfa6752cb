"""Text of tokens that come one after another, and where it stops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

CONTEXT = 5  # tokens of the prompt that decide whether the answer begins with a space
REPLACEMENT = "\ufffd"  # stands for the bytes of a character that is not whole


class Detokenizer:
    """Decodes tokens one by one. A character is given out once all its tokens are there."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], skip_special: bool = True) -> None:
        """skip_special: special tokens have no text."""
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._tokens = list(prompt[-CONTEXT:])
        # Text up to _end was given out. It is decoded again from _start, so that what follows has its context.
        self._start, self._end = 0, len(self._tokens)

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT):
            return ""
        if text:  # a special token has none, and is no context: the space of the next would be lost
            self._start = self._end
        self._end = len(self._tokens)
        return text

    def finish(self) -> str:
        """Text of the tokens that completed no character."""
        return self._text() if self._end < len(self._tokens) else ""

    def _text(self) -> str:
        known, all_text = (
            self._tokenizer.decode(
                self._tokens[self._start : end],
                skip_special_tokens=self._skip_special,
                clean_up_tokenization_spaces=False,
            )
            for end in (self._end, len(self._tokens))
        )
        return str(all_text[len(known) :])


class StopStrings:
    """Ends a text at the first of some strings, however its pieces are cut."""

    def __init__(self, strings: Sequence[str], included: bool = False) -> None:
        """included: the text ends after the string, not before it."""
        self._strings, self._included = strings, included
        self._held = ""  # the end of the text, which may begin a stop string

    def push(self, text: str) -> tuple[str, bool]:
        """Text that may be given out, and whether a stop string has come."""
        self._held += text
        found = [(place, one) for one in self._strings if (place := self._held.find(one)) >= 0]
        if found:
            place, string = min(found)
            text, self._held = self._held[: place + len(string) * self._included], ""
            return text, True
        held = max((overlap(self._held, one) for one in self._strings), default=0)
        given = len(self._held) - held
        text, self._held = self._held[:given], self._held[given:]
        return text, False

    def finish(self) -> str:
        """Text that was held back, once no more follows."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(stop[:count])), 0)
