"""Messages of chats, as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

from fastattention.integrations.transformers.serving.errors import shortened

ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


def message_for_template(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """A message for the chat template. Raises ValueError for what it cannot hold."""
    if given.get("role") not in ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, got {shortened(given.get('role'))}")
    kept = {name: value for name, value in given.items() if value not in (None, [], {})}
    for name in kept.keys() - set(_MESSAGE_FIELDS):
        raise ValueError(f"{where}.{name} is not served; leave it out")
    kept["content"] = _content(f"{where}.content", kept.get("content"))
    if kept["content"] is None and "tool_calls" not in kept:
        raise ValueError(f"{where}.content is missing")
    if kept["role"] == "developer":  # OpenAI's later name of the role that templates know as "system"
        kept["role"] = "system"
    if not isinstance(kept.get("tool_calls", []), list):
        raise ValueError(f"{where}.tool_calls must be a list, got {shortened(kept['tool_calls'])}")
    if "tool_calls" in kept:
        kept["tool_calls"] = [_tool_call(f"{where}.tool_calls", call) for call in kept["tool_calls"]]
    return kept


def _content(where: str, given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError(f"{where} must be a string or a list of text parts, got {shortened(given)}")
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part of type {shortened(kind)}; this server takes text only")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, as chat templates expect. Clients send them as a string of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must hold objects with function.name, got {shortened(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: function.arguments is not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
