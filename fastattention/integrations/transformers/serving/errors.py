"""The error that a client is answered with, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class RequestError(Exception):
    """Ends one request with a status and a sentence."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code
        # They may quote what a client sent, and JSON can hold text that UTF-8 cannot.
        self.message, self.param = (text and text.encode(errors="replace").decode() for text in (message, param))

    def body(self) -> dict[str, Any]:
        """The JSON of the error."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shortened(value: object) -> str:
    """What a client sent, for a message."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def context_too_long(given: str, longest: int, param: str) -> RequestError:
    """The error for a prompt that leaves no room for an answer. given: its size, in words."""
    return RequestError(
        400, f"the prompt has {given}; this server takes 1 to {longest - 1} tokens", param, "context_length_exceeded"
    )
