"""/v1/responses, by the openai client: whole and streamed answers, calls of functions, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from word_model import words

from fastattention.integrations.transformers.serving import engine
from fastattention.integrations.transformers.serving.tools import FORMATS
from integrations.serving_models import Served, prompts, serve

PROMPT = prompts()[4]
SCHEMA = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
CALL = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'}


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    found = serve(folder)
    yield found
    found.service.engine.stop(10)


def by_client(served: Served, ask: Callable[[openai.AsyncOpenAI], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        http = openai.DefaultAsyncHttpx2Client(transport=httpx2.ASGITransport(served.service.app()))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
            return await ask(client)

    return asyncio.run(run())


def streamed(served: Served, **body: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and its response."""

    async def ask(client: openai.AsyncOpenAI) -> tuple[list[Any], Any]:
        async with client.responses.stream(model="tiny", **body) as stream:
            events = [event async for event in stream]
            response = events[-1].response
            if response.status == "completed":  # the client raises for others
                assert (await stream.get_final_response()).output_text == response.output_text
            return events, response

    found: tuple[list[Any], Any] = by_client(served, ask)
    events, _ = found
    assert [one.sequence_number for one in events] == list(range(len(events)))
    return found


def test_a_response_is_what_a_chat_answers(served: Served) -> None:
    whole = by_client(
        served,
        lambda client: client.responses.create(
            model="tiny", instructions=words(PROMPT[:3]), input=words(PROMPT[3:]), max_output_tokens=8, store=True,
            temperature=2.0, extra_body={"top_k": 1, "ignore_eos": True},
        ),
    )  # fmt: skip
    assert whole.output_text.split() == words(served.greedy(PROMPT)).split()
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (len(PROMPT), 8)
    assert whole.model_dump()["output"][0]["content"][0]["annotations"] == []
    events, final = streamed(
        served,
        input=[
            {"role": "developer", "content": words(PROMPT[:3])},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words(PROMPT[3:])}]},
        ],
        max_output_tokens=8,
    )
    assert final.output_text == whole.output_text
    assert final.usage == whole.usage
    kinds = [one.type.removeprefix("response.") for one in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[4:-4] == ["output_text.delta"] * 8
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(one.delta for one in events[4:-4]) == whole.output_text == events[-4].text


def test_an_answer_of_no_text_is_a_message(served: Served) -> None:
    body = {"input": [{"role": "user", "content": "t3 "}], "max_output_tokens": 1}
    eos = served.service._eos
    try:
        served.service._eos = list(range(200))
        whole = served.ask("/v1/responses", body).json
        events, final = streamed(served, **body)
    finally:
        served.service._eos = eos
    assert whole["status"] == final.status == events[-1].response.status == "completed"
    assert whole["output"][0]["content"][0]["text"] == final.output_text == ""


def test_a_response_follows_a_json_schema(bytewise: Served) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}}
    _, final = streamed(bytewise, input="Where?", text=form, max_output_tokens=200, temperature=0.5)
    assert json.loads(final.output_text)["city"] in ("Rome", "Oslo")
    assert final.status == "completed"


def test_a_function_is_called_and_its_output_read(bytewise: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytewise.service, "_tool_format", FORMATS["hermes"])
    body: Any = {
        "input": "Where?", "tools": [TOOL], "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 200,
    }  # fmt: skip
    whole = by_client(bytewise, lambda client: client.responses.create(model="tiny", **body))
    events, final = streamed(bytewise, **body)
    for found in (whole, final):
        [call] = found.output
        assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
        assert found.output_text == ""
    kinds = [one.type.removeprefix("response.") for one in events[2:-1]]
    arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == ["output_item.added", *arguments, "output_item.done"]
    sent: list[Any] = []
    monkeypatch.setattr(bytewise.service._prompts, "chat", lambda *args: sent.append(args) or [1, 2])
    output = {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "Rain"}]}
    items = [{"role": "assistant", "content": "I look."}, CALL, CALL, output]
    reply = bytewise.ask("/v1/responses", {"input": items, "tools": [TOOL], "max_output_tokens": 1})
    assert reply.status == 200
    [(messages, tools, _)] = sent
    assert tools == [{"type": "function", "function": {one: TOOL[one] for one in ("name", "parameters", "strict")}}]
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages == [
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "1", "type": "function", "function": function}] * 2,
        },
        {"role": "tool", "tool_call_id": "1", "content": "Rain"},
    ]


def test_text_before_a_call_is_a_message_of_its_own(bytewise: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces alone are none."""
    monkeypatch.setattr(bytewise.service, "_tool_format", FORMATS["hermes"])
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    for text in (" I look. ", "\n\n", ""):
        tokens = [*bytewise.service._tokenizer(f"{text}{call}")["input_ids"], *bytewise.service._eos]
        forced = (([token], [None]) for token in [*tokens, *tokens])
        monkeypatch.setattr(engine, "choose", lambda *_, forced=forced: next(forced))
        body: Any = {"input": "Where?", "tools": [TOOL]}
        whole = bytewise.ask("/v1/responses", body).json["output"]
        _, final = streamed(bytewise, **body)
        for output in (whole, [one.model_dump() for one in final.output]):
            *messages, last = output
            assert (last["type"], last["name"]) == ("function_call", "weather")
            assert [one["content"][0]["text"] for one in messages] == ([text] if text.strip() else [])


def test_a_stream_that_fails_is_told(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(served.service.engine._batch.model_runner, "compute_batch", fail)
    with pytest.raises(openai.APIError, match="no memory"):
        streamed(served, input="t3")


BAD: list[tuple[Any, str]] = [
    ({}, "input is missing"),
    ({"input": []}, "input must be a string or a list of items, got []"),
    ({"input": [3]}, "input[0].type=None is not served"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content has a part of type 'input_im",
    ),
    ({"input": [{"role": "robot", "content": "t3"}]}, "input[0].role must be one of"),
    ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type='item_reference' is not served"),
    ({"input": [{**CALL, "arguments": "{"}]}, "function.arguments is not JSON"),
    ({"input": [{**CALL, "name": None}]}, "must hold objects with function.name"),
    ({"input": [{"type": "function_call_output", "call_id": "1"}]}, "input[0].content is missing"),
    ({"input": "t3", "previous_response_id": "resp_1"}, "previous_response_id='resp_1' is not served"),
    ({"input": "t3", "background": True}, "background=True is not served"),
    ({"input": "t3", "reasoning": {"effort": "low"}}, "reasoning={'effort': 'low'} is not served"),
    ({"input": "t3", "include": ["message.output_text.logprobs"]}, "include=["),
    ({"input": "t3", "tools": [{"type": "web_search"}]}, "tools[0].type='web_search' is not served; use 'function'"),
    ({"input": "t3", "tool_choice": "required"}, "tool_choice='required' needs tools"),
    ({"input": "t3", "text": {"verbosity": "low"}}, "text.verbosity='low' is not served"),
    ({"input": "t3", "text": {"format": {"type": "json_schema"}}}, "must be a JSON schema"),
    ({"input": "t3", "max_output_tokens": 0}, "max_output_tokens: input should be greater"),
    ({"input": "t3", "messages": []}, "'messages' is not a parameter of this endpoint"),
    ({"input": "t3", "top_k": -2}, "top_k: input should be greater"),
    ({"input": "t3", "model": "another"}, "model 'another' is not served"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_what_is_not_served_is_refused_by_name(served: Served, body: Any, message: str) -> None:
    reply = served.ask("/v1/responses", body)
    assert reply.status in (400, 404)
    assert message in reply.error["message"]
