"""Requests as real clients send them. clients/test.sh runs the clients themselves, and writes what they send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion, Model, responses
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from fastattention.integrations.transformers.serving.tools import FORMATS
from integrations.asgi import Reply, call
from integrations.serving_models import Served, serve

REQUESTS = json.loads((Path(__file__).parent / "clients" / "requests.json").read_text())
# By path: what the answer is, and the events of a stream.
TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/completions": (Completion, Completion),
    "/v1/responses": (responses.Response, responses.ResponseStreamEvent),
}
PROBED = ("/tokenizer_info",)  # lm_eval goes on without


@pytest.fixture(scope="module")
def served(bytewise_folder: Path) -> Iterator[Served]:
    found = serve(bytewise_folder)
    found.service._tool_format = FORMATS["hermes"]
    yield found
    found.service.engine.stop(10)


def events(reply: Reply) -> list[Any]:
    """JSON of server-sent events, whether or not they have names."""
    lines = [line for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def typed(kind: Any, given: Any) -> Any:
    """What was given, by a type of the openai package. The type of completions has no null where the API has it."""
    if kind is Completion:
        for choice in given["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"  # in a stream
            for name in ("token_logprobs", "top_logprobs") if choice["logprobs"] else ():
                choice["logprobs"][name] = [one for one in choice["logprobs"][name] if one is not None]
    return TypeAdapter(kind).validate_python(given)


@pytest.mark.parametrize("client", dict.fromkeys(one["client"] for one in REQUESTS))
def test_what_a_client_sends_is_served_in_openais_types(served: Served, client: str) -> None:
    requests = [one for one in REQUESTS if one["client"] == client]

    async def ask() -> list[Reply]:
        app = served.service.app()
        asked = (call(app, one["path"], one["body"], headers=one["headers"]) for one in requests)
        return list(await asyncio.gather(*asked))

    for request, reply in zip(requests, asyncio.run(ask()), strict=True):
        assert reply.status == (404 if request["path"] in PROBED else 200), (request, reply.body)
        body = request["body"] or {}
        if request["path"] == "/v1/models":
            assert [Model.model_validate(one).id for one in reply.json["data"]] == ["tiny"]
        elif request["path"] in TYPES and body.get("stream"):
            parts = [typed(TYPES[request["path"]][1], one) for one in events(reply)]
            assert len(parts) > 1
        elif request["path"] in TYPES:
            found = typed(TYPES[request["path"]][0], reply.json)
            if "tool_choice" in body:
                assert found.choices[0].message.tool_calls[0].function.name == "City"
