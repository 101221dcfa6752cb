"""Tool calls: read from text in every format, and required of a model."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx2
import openai
import pytest

from fastattention.cli.choices import ToolFormat
from fastattention.integrations.transformers.serving import engine
from fastattention.integrations.transformers.serving.tools import (
    FORMATS,
    CallReader,
    find_format,
    grammar_of_calls,
)
from integrations.serving_models import Served

CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Oslo"]}},
}  # fmt: skip
FLAG = {
    "type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
FUNCTIONS = [{"name": "weather", "parameters": CITY}, {"name": 'z\u00fcrich"s', "parameters": FLAG}]
TOOLS: Any = [{"type": "function", "function": one} for one in FUNCTIONS]
ROME, OSLO = ("weather", {"city": "Rome"}), ("weather", {"city": "Oslo"})
ONE = '{"name": "weather", "arguments": {"city": "Rome"}}'
TWO = '{"name":"weather","parameters":{"city":"Oslo"}}'
OTHER = '{"name": "other", "arguments": {}}'

# Format, answer, text that is left, calls
TEXTS: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", "No calls {} here, <tool", "No calls {} here, <tool", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [ROME]),
    ("hermes", f"First.\n<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", "First.\n", [ROME, OSLO]),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>\nDone <b>", "Done <b>", [ROME]),
    ("hermes", f"<tool_call>\n{ONE}", "", [ROME]),
    ("hermes", f"<tool_call>\n{ONE[:-3]}", f"<tool_call>\n{ONE[:-3]}", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{{", "<tool_call>\n{", [ROME]),
    ("hermes", f"<tool_call>\n{OTHER}\n</tool_call>", f"<tool_call>\n{OTHER}\n</tool_call>", []),
    ("hermes", "<tool_call>python</tool_call>", "<tool_call>python</tool_call>", []),
    ("hermes", '<tool_call>{"a": ' + "[" * 2000, '<tool_call>{"a": ' + "[" * 2000, []),
    ("hermes", f"<tool_call><tool_call>{ONE}", "", [ROME]),
    ("llama3", "Rome {}", "Rome {}", []),
    ("llama3", f" {TWO}", "", [OSLO]),
    ("llama3", f"<|python_tag|>{TWO}; {ONE}", "", [OSLO, ROME]),
    ("llama3", '{"answer": "Rome"} ', '{"answer": "Rome"} ', []),
    ("llama3", f"I call {TWO}", f"I call {TWO}", []),
    ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("mistral", "[1, 2] [TOOL", "[1, 2] [TOOL", []),
    ("mistral", f"[TOOL_CALLS][{ONE}]", "", [ROME]),
    ("mistral", f"Now: [TOOL_CALLS] [{ONE}, {TWO}]", "Now: ", [ROME, OSLO]),
    ("mistral", "[TOOL_CALLS]weather[ARGS]{}", "[TOOL_CALLS]weather[ARGS]{}", []),
]


def read(name: str, pieces: list[str], most: int | None = None) -> tuple[str, list[Any]]:
    reader = CallReader(FORMATS[name], {one["name"] for one in FUNCTIONS}, most)
    shown, calls = "", []
    for at, piece in enumerate(pieces, start=1):
        text, found = reader.push(piece, at == len(pieces))
        shown += text
        calls += [tuple(one) for one in found]
    return shown, calls


@pytest.mark.parametrize(("name", "text", "left", "calls"), TEXTS, ids=[f"{one[0]} {one[1][:40]}" for one in TEXTS])
def test_calls_are_read_however_a_text_is_cut(name: str, text: str, left: str, calls: list[Any]) -> None:
    assert read(name, [text]) == (left, calls)
    assert read(name, [text, ""]) == (left, calls)
    assert read(name, list(text)) == (left, calls)
    for first, second in itertools.combinations(range(min(len(text), 60)), 2):
        assert read(name, [text[:first], text[first:second], text[second:]]) == (left, calls)


def test_text_comes_as_soon_as_it_is_no_call() -> None:
    reader = CallReader(FORMATS["hermes"], {"weather"}, None)
    assert [reader.push(piece)[0] for piece in ("a <to", "p> b<", "c")] == ["a ", "<top> b", "<c"]


def test_other_calls_are_dropped_where_one_is_allowed() -> None:
    assert read("hermes", [f"<tool_call>{ONE}</tool_call><tool_call>{TWO}</tool_call>"], most=1) == ("", [ROME])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("return a json object with function name and arguments within <tool_call></tool_call>\nTags", "hermes"),
        ("arguments within <tool_call>\n<function=name>\n<parameter=", None),
        ("arguments: <tool_call>{name}\n<arg_key>", None),
        (r'{{ "format {\"name\": function name, \"parameters\": dictionary of argument name" }}', "llama3"),
        ('{{- "[TOOL_CALLS] [" }}{"name": name, "arguments": arguments}', "mistral"),
        ('{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}', None),
        ("{{ messages[0].content }}", None),
        ("None", None),
    ],
)
def test_a_format_is_known_by_the_chat_template(template: str, name: str | None) -> None:
    found = find_format("auto", template)
    assert found == (None if name is None else FORMATS[name])
    assert find_format("none", template) is None
    assert find_format("llama3", template) == FORMATS["llama3"]


def test_the_command_line_has_every_format() -> None:
    assert sorted(one.value for one in ToolFormat) == sorted(["auto", *FORMATS, "none"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_allows_what_the_reader_reads(bytewise: Served, name: str) -> None:
    form, tokenizer = FORMATS[name], bytewise.service._tokenizer

    def allowed(text: str, most: int | None) -> bool:
        grammar = bytewise.service._grammars.of_calls(grammar_of_calls(form, FUNCTIONS, most, tokenizer))
        tokens = tokenizer(text)["input_ids"]
        return grammar._matcher.try_consume_tokens(tokens) == len(tokens) and bool(grammar._matcher.is_accepting())

    calls: list[Any] = [ROME, ('z\u00fcrich"s', {"a": True}), OSLO]
    before, between, after = form.required
    for count in (1, 3):
        written = (
            json.dumps({"name": one, form.arguments: arguments}, ensure_ascii=False) for one, arguments in calls[:count]
        )
        text = before + between.join(written) + after
        assert read(name, [text]) == ("", calls[:count])
        assert allowed(text, None)
        assert allowed(text, 1) == (count == 1)
        assert not allowed(text.replace("Rome", "Paris"), None)
        assert not allowed(text.replace("weather", "whether"), None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_comes_whole_and_in_a_stream(
    bytewise: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bytewise.service, "_tool_format", FORMATS[name])
    spaces = {str(token): -100 for token in bytewise.service._tokenizer(" \n\t\r")["input_ids"]}
    body: Any = {
        "model": "tiny", "messages": [{"role": "user", "content": "Where?"}], "tools": TOOLS, "max_tokens": 300,
        "temperature": 1.0, "seed": 3, "logit_bias": spaces,
    }  # fmt: skip

    async def ask() -> None:
        http = openai.DefaultAsyncHttpx2Client(transport=httpx2.ASGITransport(bytewise.service.app()))
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as client:
            named: Any = {"type": "function", "function": {"name": "weather"}}
            choices: Any = [{"tool_choice": named}, {"tool_choice": "required", "parallel_tool_calls": False}]
            for choice in choices:
                [whole] = (await client.chat.completions.create(**body, **choice)).choices
                [call] = whole.message.tool_calls or []
                assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
                assert (whole.message.content, whole.finish_reason) == (None, "tool_calls")
                assert call.function.name == "weather" or choice is not choices[0]
                arguments = json.loads(call.function.arguments)
                assert call.function.name != "weather" or arguments["city"] in ("Rome", "Oslo")
                again: dict[str, str] = {}
                async for event in await client.chat.completions.create(**body, **choice, stream=True):
                    [part] = event.choices
                    for delta in part.delta.tool_calls or []:
                        assert (delta.index, delta.type, len(delta.id or "")) == (0, "function", 9)
                        assert delta.function is not None
                        again[delta.function.name or ""] = delta.function.arguments or ""
                    assert not part.delta.content
                assert part.finish_reason == "tool_calls"
                assert again == {call.function.name: call.function.arguments}

    asyncio.run(ask())


def test_calls_that_a_model_makes_by_itself_are_counted(bytewise: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"I look.<tool_call>{ONE}</tool_call>\n<tool_call>\n{TWO}</tool_call>"
    tokens = [*bytewise.service._tokenizer(text)["input_ids"], *bytewise.service._eos]
    forced = (([token], [None]) for token in [*tokens, *tokens, *tokens])
    monkeypatch.setattr(engine, "choose", lambda *_: next(forced))
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "auto"}
    assert bytewise.ask("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == text
    monkeypatch.setattr(bytewise.service, "_tool_format", FORMATS["hermes"])
    [choice] = bytewise.ask("/v1/chat/completions", body).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("I look.", "tool_calls")
    parts = [one["choices"][0] for one in bytewise.ask("/v1/chat/completions", {**body, "stream": True}).events]
    assert [one["finish_reason"] for one in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
    assert "".join(one["delta"].get("content", "") for one in parts) == "I look."
    calls = [call for one in parts for call in one["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    for found in (calls, choice["message"]["tool_calls"]):
        functions = [call["function"] for call in found]
        assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [ROME, OSLO]


def test_a_call_that_is_cut_off_is_text(bytewise: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytewise.service, "_tool_format", FORMATS["mistral"])
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required", "max_tokens": 9}
    [choice] = bytewise.ask("/v1/chat/completions", body).json["choices"]
    assert choice["message"]["content"] == '[TOOL_CALLS][{"name"'
    assert (choice["finish_reason"], "tool_calls" in choice["message"]) == ("length", False)


def test_a_call_cannot_be_required_in_an_unknown_format(bytewise: Served) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    reply = bytewise.ask("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "tool_choice")
    assert "name it by --tool-format" in reply.error["message"]


def test_parameters_that_no_grammar_holds_are_refused(bytewise: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bytewise.service, "_tool_format", FORMATS["hermes"])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "robot"}}}]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": tools, "tool_choice": "required"}
    reply = bytewise.ask("/v1/chat/completions", body)
    assert (reply.status, reply.error["param"]) == (400, "tools")
    assert "tools: the schema is not served" in reply.error["message"]
