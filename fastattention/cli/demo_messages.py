"""The JSON messages between `fastattention demo` and its worker processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DemoRequest:
    """What to generate, with which model and attention."""

    model: str  # a model folder
    attention: str  # a value of choices.AttnImplementation
    prompt: str
    max_new_tokens: int
    num_threads: int


@dataclass(frozen=True)
class Result:
    """The result of a request. extra_bytes: resident memory beyond the loaded, warm model; None if not measurable."""

    attention: str
    tokens: list[int]
    text: str
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float  # all tokens after the first
    extra_bytes: int | None
