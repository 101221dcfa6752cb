"""Turns prompts and chats into tokens, of a length that the model can answer."""

from __future__ import annotations

import inspect
from typing import Any

from jinja2.exceptions import TemplateError

from fastattention.integrations.transformers.serving.echoes import Echo
from fastattention.integrations.transformers.serving.errors import RequestError, context_too_long
from fastattention.integrations.transformers.serving.text import Detokenizer

# Longer text is refused before it is split into tokens, which takes 150 times its memory. No text of ordinary words has
# as many characters a token.
CHARACTERS_A_TOKEN = 64


class Prompts:
    """The tokens of requests to one model. Its methods may take long: call them in one thread beside the event loop."""

    def __init__(self, tokenizer: Any, longest: int, vocab_size: int) -> None:
        """longest: tokens of a prompt and its answer at most."""
        self._tokenizer, self._longest, self._vocab_size = tokenizer, longest, vocab_size
        tokenizer("a")  # settles padding and truncation, which later calls would set while other threads decode
        words = (len(word) for word in tokenizer.get_vocab())
        self._most_characters = longest * max(CHARACTERS_A_TOKEN, max(words) + 1)

    def complete(self, prompt: str | list[int]) -> list[int]:
        """The tokens of a prompt. Raises RequestError (400) for lengths and ids that are not allowed."""
        if isinstance(prompt, str):
            return self._encode(prompt, "prompt", special=True)
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise RequestError(400, f"prompt: token {token} must be 0 to {self._vocab_size - 1}", "prompt")
        return self._checked(prompt, "prompt")

    def echo(self, skip_special: bool, with_logprobs: bool, prompt: str | list[int], tokens: list[int]) -> Echo:
        """A prompt as text. skip_special: without special tokens; tokens: those of the prompt."""
        text = prompt
        if not isinstance(text, str):
            text = self._tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        if not with_logprobs:
            return Echo(text)
        detokenizer, places, place = Detokenizer(self._tokenizer, [], skip_special), [], 0
        for token in tokens:
            places.append(place)
            place += len(detokenizer.push(token))
        return Echo(text, places)

    def chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> list[int]:
        """The tokens of a chat by the model's template. Raises RequestError (400) for what the template refuses.

        options: variables of the template, e.g. enable_thinking
        """
        template = self._tokenizer.chat_template
        if not template:
            raise RequestError(400, "this model has no chat template; use /v1/completions", "messages")
        if tools and "tools" not in str(template):
            raise RequestError(400, "this model's chat template takes no tools", "tools")
        reserved = options.keys() & inspect.signature(self._tokenizer.apply_chat_template).parameters
        if reserved:
            message = f"chat_template_kwargs must not have {', '.join(sorted(reserved))}"
            raise RequestError(400, message, "chat_template_kwargs")
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=True, tokenize=False, **options
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RequestError(400, f"the model's chat template refuses the messages: {error}", "messages") from error
        return self._encode(text, "messages", special=False)

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        if len(text) > self._most_characters:
            raise context_too_long(f"{len(text)} characters", self._longest, param)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(400, f"{param} is not text: {error}", param) from error
        return self._checked(self._tokenizer(text, add_special_tokens=special)["input_ids"], param)

    def _checked(self, tokens: list[int], param: str) -> list[int]:
        if not 1 <= len(tokens) < self._longest:
            raise context_too_long(f"{len(tokens)} tokens", self._longest, param)
        return tokens
