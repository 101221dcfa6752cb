"""/v1/responses: requests, which become those of a chat, and answers. Nothing is stored between requests."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from fastattention.integrations.transformers.serving.answers import Answer, Writer
from fastattention.integrations.transformers.serving.engine import Piece
from fastattention.integrations.transformers.serving.errors import RequestError, shortened
from fastattention.integrations.transformers.serving.messages import message_for_template
from fastattention.integrations.transformers.serving.protocol import ChatRequest, Strict, checked, without_neutral
from fastattention.integrations.transformers.serving.tools import Call, CallReader

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "include": (None, []),
    "max_tool_calls": (None,),
    "previous_response_id": (None,),
    "prompt": (None,),
    "reasoning": (None, {}),
    "stream_options": (None, {}, {"include_obfuscation": False}),
    "top_logprobs": (None, 0),
    "truncation": (None, "disabled"),
}
# Parameters that OpenAI's API does not have here. They are those of chats.
_AS_IN_CHATS = ("top_k", "min_p", "seed", "stop", "ignore_eos", "min_tokens", "repetition_penalty", "presence_penalty",
                "frequency_penalty", "logit_bias", "chat_template_kwargs")  # fmt: skip


def _as_messages(given: object) -> object:
    """The input as messages of a chat."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"input must be a string or a list of items, got {shortened(given)}")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            kept = {name: value for name, value in item.items() if name not in ("type", "id", "status", "phase")}
            kept["content"] = _content(kept.get("content"))
            messages.append(message_for_template(where, kept))
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = [*messages[-1].get("tool_calls", ()), call]
            messages[-1] = message_for_template(where, {**messages[-1], "tool_calls": calls})
        elif kind == "function_call_output":
            found = {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
            messages.append(message_for_template(where, found))
        else:
            raise ValueError(f"{where}.type={shortened(kind)} is not served; use messages and calls of functions")
    return messages


def _content(given: object) -> object:
    """Content whose parts of text are named as in a chat."""
    if not isinstance(given, list):
        return given
    texts = ({"type": "text", "text": one.get("text")} if _is_text(one) else one for one in given)
    return list(texts)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("input_text", "output_text")


class ResponseRequest(Strict):
    """POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: Annotated[list[dict[str, Any]], BeforeValidator(_as_messages)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = False
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = without_neutral(given, _NEUTRAL)
        for name in kept.keys() - cls.model_fields.keys() - set(_AS_IN_CHATS):
            raise ValueError(f"{shortened(name)} is not a parameter of this endpoint")
        return kept

    @field_validator("tools")
    @classmethod
    def _check_tools(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        for index, tool in enumerate(tools or ()):
            if tool.get("type") != "function":
                raise ValueError(f"tools[{index}].type={shortened(tool.get('type'))} is not served; use 'function'")
        return tools

    @field_validator("text")
    @classmethod
    def _check_text(cls, text: dict[str, Any] | None) -> dict[str, Any] | None:
        for name, value in (text or {}).items():
            if name != "format" and value is not None:
                raise ValueError(f"text.{name}={shortened(value)} is not served; leave it out")
        return text

    def chat(self) -> ChatRequest:
        """The same request of a chat. Raises RequestError (400) for what is not served."""
        form, choice = (self.text or {}).get("format"), self.tool_choice
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
        if isinstance(choice, dict) and "name" in choice:
            choice = {"type": choice.get("type"), "function": {"name": choice["name"]}}
        tools = [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            for tool in self.tools or ()
        ]
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        given = {
            "messages": [*first, *self.input], "max_completion_tokens": self.max_output_tokens, "response_format": form,
            "tools": tools, "tool_choice": choice, "model": self.model, "temperature": self.temperature,
            "top_p": self.top_p, "stream": self.stream, "parallel_tool_calls": self.parallel_tool_calls,
            **(self.model_extra or {}),
        }  # fmt: skip
        return checked(ChatRequest, given)


class ResponseWriter(Writer):
    """Writes a response, whose output is a list of items: messages, and calls of functions."""

    def __init__(self, model: str, asked: ResponseRequest, reader: Callable[[], CallReader] | None) -> None:
        """reader: makes what finds tool calls; None leaves them in the text."""
        self._reader = None if reader is None else reader()
        self._numbers = itertools.count()
        self._output: list[dict[str, Any]] = []
        self._message: dict[str, Any] | None = None  # the item that text is added to
        self._space = ""  # with which text may begin; before a call it is none
        self._head = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model,
            "error": None, "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens,
            "temperature": asked.temperature, "top_p": asked.top_p, "text": asked.text or {"format": {"type": "text"}},
            "tools": asked.tools or [], "tool_choice": asked.tool_choice or "auto", "metadata": {}, "store": False,
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "previous_response_id": None,
            "truncation": "disabled",
        }  # fmt: skip

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """The JSON of a request that is not streamed."""
        [answer] = answers
        for _ in self.chunk(0, Piece(answer.text, finish_reason=answer.finish_reason), lambda: usage):
            pass
        return self._response(answer.finish_reason, usage)

    def opening(self) -> Iterator[str]:
        """Events before all others."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response={**self._head, "status": "in_progress", "output": []})

    def chunk(self, index: int, piece: Piece, usage: Callable[[], dict[str, Any]]) -> Iterator[str]:
        """Events of a piece."""
        last = piece.finish_reason is not None
        text, calls = (piece.text, []) if self._reader is None else self._reader.push(piece.text, last)
        text, self._space = self._space + text, ""
        if self._message is None and not text.strip() and (calls or self._output or not last):
            self._space = text
        else:
            yield from self._add_text(text)
        for call in calls:
            self._space = ""
            yield from self._end_message("completed")
            yield from self._add_call(call)
        if last:
            yield from self._end_message("incomplete" if piece.finish_reason == "length" else "completed")

    def closing(self, answers: Sequence[Answer], usage: dict[str, Any]) -> Iterator[str]:
        """The last event: the whole response."""
        response = self._response(answers[0].finish_reason, usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: RequestError) -> str:
        """The last event of a stream that fails. Clients look for its fields in either place."""
        body = error.body()["error"]
        return self._event("error", **{name: body[name] for name in ("code", "message", "param")}, error=body)

    def _add_text(self, text: str) -> Iterator[str]:
        if self._message is None:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._message = {
                "type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "status": "in_progress",
                "content": [part],
            }  # fmt: skip
            self._output.append(self._message)
            yield self._event("response.output_item.added", **self._place, item={**self._message, "content": []})
            yield self._event("response.content_part.added", **self._part_place, part=part)
        if text:
            self._message["content"][0]["text"] += text
            yield self._event("response.output_text.delta", **self._part_place, delta=text, logprobs=[])

    def _end_message(self, status: str) -> Iterator[str]:
        if self._message is None:
            return
        self._message["status"] = status
        [part] = self._message["content"]
        yield self._event("response.output_text.done", **self._part_place, text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._part_place, part=part)
        yield self._event("response.output_item.done", **self._place, item=self._message)
        self._message = None

    def _add_call(self, call: Call) -> Iterator[str]:
        described = call.described()
        item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": described["id"],
                "status": "completed", **described["function"]}  # fmt: skip
        self._output.append(item)
        place, arguments = {**self._place, "item_id": item["id"]}, item["arguments"]
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", **self._place, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
        yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=arguments)
        yield self._event("response.output_item.done", **self._place, item=item)

    @property
    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1}

    @property
    def _part_place(self) -> dict[str, Any]:
        return {**self._place, "item_id": self._output[-1]["id"], "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> str:
        body = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"

    def _response(self, finish_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        cut = finish_reason == "length"
        counts = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        return {
            **self._head, "status": "incomplete" if cut else "completed", "output": self._output, "usage": counts,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        }  # fmt: skip
