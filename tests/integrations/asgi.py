"""Calls an ASGI application in this process, as a client that may leave."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """What the application answered, as far as the client has read it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of an answer in OpenAI's form."""
        found = self.json["error"]
        assert found.keys() == {"message", "type", "param", "code"}
        assert isinstance(found["message"], str)
        return dict(found)

    @property
    def events(self) -> list[Any]:
        """JSON of the server-sent events before [DONE]."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    parts: int = 1,
    leave: asyncio.Event | None = None,
    leave_after: int | None = None,
) -> Reply:
    """The reply to a POST of `body`, or to a GET without one.

    parts: in how many the body is sent, without a content-length unless it is 1; leave: the client leaves when it is
    set; leave_after: parts of the reply after which the client leaves
    """
    text = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    left = leave or asyncio.Event()
    given = dict(headers or {}) | ({"content-length": str(len(text))} if parts == 1 else {})
    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "path": path,
        "method": "GET" if body is None else "POST", "scheme": "http", "server": ("test", 80), "client": ("test", 1),
        "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
    }  # fmt: skip
    size = -(-len(text) // parts)
    pieces = [text[start : start + size] for start in range(0, len(text), size or 1)] or [b""]
    status, found, read = 0, {}, []

    async def receive() -> dict[str, Any]:
        if pieces:
            piece = pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(pieces)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            found.update({name.decode(): value.decode() for name, value in message["headers"]})
        else:
            read.append(message["body"])
            if leave_after is not None and len(read) >= leave_after:
                left.set()

    await asyncio.wait_for(app(scope, receive, send), 120)
    return Reply(status, found, b"".join(read))
