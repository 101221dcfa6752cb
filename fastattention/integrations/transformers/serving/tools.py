"""Tool calls: how families of models write them, how they are required, and how they are read from text."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastattention.integrations.transformers.serving.text import overlap


@dataclass(frozen=True)
class Format:
    """Calls in a text. Each is {"name": "...", ARGUMENTS: {...}}, with marks around and between them."""

    template: str  # a regular expression that is found in the chat templates of models that write so
    marks: tuple[str, ...]  # the first begins calls; the last ends one or parts two
    required: tuple[str, str, str]  # before, between and after calls that are required
    arguments: str = "arguments"  # of calls that are required; others may say "arguments" or "parameters"
    first: bool = False  # calls come first in an answer or not at all, and need no mark


FORMATS = {
    "mistral": Format(
        template=r"\[TOOL_CALLS\]\s*\[(?!ARGS)",
        marks=("[TOOL_CALLS]", "[", ",", "]"),
        required=("[TOOL_CALLS][", ", ", "]"),
    ),
    "llama3": Format(
        template=r"\\?\"parameters\\?\": dictionary of argument name",
        marks=("<|python_tag|>", ";"),
        required=("", "; ", ""),
        arguments="parameters",
        first=True,
    ),
    "hermes": Format(  # Qwen and others. Some write XML between the same marks
        template=r"\A(?!.*(?:<function=|<arg_key>))(?=.*arguments).*<tool_call>",
        marks=("<tool_call>", "</tool_call>"),
        required=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    ),
}


def find_format(name: str, chat_template: str) -> Format | None:
    """The format of this name. auto: what the chat template tells the model to write, if it is one of ours."""
    if name != "auto":
        return FORMATS.get(name)
    return next((one for one in FORMATS.values() if re.search(one.template, chat_template, re.DOTALL)), None)


# Spaces as models have learned them. Any number would be allowed otherwise, and small models may write nothing else.
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def has_special_marks(form: Format, tokenizer: Any) -> bool:
    """Whether marks are special tokens, which are left out of text unless it is asked to hold them."""
    return any(token.special and str(token) in form.marks for token in tokenizer.added_tokens_decoder.values())


def grammar_of_calls(form: Format, tools: Sequence[Mapping[str, Any]], most: int | None, tokenizer: Any) -> str:
    """The grammar, in llguidance's Lark, of answers that call one or more of the tools.

    tools: functions with "name" and "parameters", a JSON schema; most: 1, or None for any number
    """
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}

    def literal(text: str) -> str:
        """The text, whose marks are tokens where the tokenizer has such."""
        parts = re.split(rf"({'|'.join(map(re.escape, form.marks))})", text)
        return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part)

    before, between, after = map(literal, form.required)
    more = "" if most == 1 else f"({between} call)*"
    rules = [f"start: {before} call {more} {after}", f"call: {' | '.join(f'call_{at}' for at in range(len(tools)))}"]
    for at, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool["name"], ensure_ascii=False)}, "{form.arguments}": '
        schema = {"type": "object", **(tool.get("parameters") or {}), "x-guidance": _SPACES}
        # A rule of its own: references in a schema count from its root.
        rules += [f'call_{at}: {json.dumps(head)} arguments_{at} "}}"', f"arguments_{at}: %json {json.dumps(schema)}"]
    return "\n".join(rules)


class Call(NamedTuple):
    """A call that the model makes."""

    name: str
    arguments: dict[str, Any]

    def described(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments)}
        # Nine letters and digits: Mistral's templates refuse other ids when clients send them back.
        return {"id": uuid.uuid4().hex[:9], "type": "function", "function": function}


class CallReader:
    """Finds calls in an answer, however its pieces are cut. Whatever is no call of a tool of the request stays text."""

    def __init__(self, form: Format, names: Collection[str], most: int | None) -> None:
        """names: of the tools that may be called; most: calls to read, None for all."""
        self._form, self._names, self._most = form, names, most
        self._glue = re.compile(rf"(?:\s|{'|'.join(map(re.escape, form.marks))})*")  # before, between and after calls
        self._held = ""  # text that may become a call
        self._marks = ""  # marks that are text if no call follows
        self._after_call = False
        self._inside = form.first  # where a call may begin, or another
        self._found = 0

    def push(self, text: str, last: bool = False) -> tuple[str, list[Call]]:
        """The text and the calls that are certain now. last: no more follows."""
        self._held += text
        shown, calls = "", []
        while self._held:
            if not self._inside:
                shown += self._until_mark(last)
                if not self._inside:
                    break
            marks = self._glue.match(self._held)
            assert marks is not None  # it may be empty
            self._marks, self._held = self._marks + marks[0], self._held[marks.end() :]
            if self._held.startswith("{"):
                if not last and "}" not in text:
                    break
                value, end = _decoded(self._held)
                if end == 0 and not last:
                    break
                call = self._call(value)
                if call is None:
                    shown += self._unused_marks() + self._held[: end or None]
                elif self._most is None or self._found < self._most:
                    calls.append(call)
                    self._found += 1
                self._marks, self._held = "", self._held[end:] if end else ""
                self._after_call = call is not None
            elif not last and any(mark.startswith(self._held) for mark in self._form.marks):
                break
            elif self._held:
                shown += self._unused_marks()
                self._inside = False
        return (shown + self._unused_marks() if last else shown), calls

    def _until_mark(self, last: bool) -> str:
        """Text before calls. The end may be held back: a mark may have begun."""
        begin, held = self._form.marks[0], self._held
        place = -1 if self._form.first else held.find(begin)
        self._inside = place >= 0
        if place < 0:
            place = len(held) if last or self._form.first else len(held) - overlap(held, begin)
        self._held = held[place:]
        return held[:place]

    def _unused_marks(self) -> str:
        """Marks that no call has followed. Those that end a call are not text."""
        place = self._marks.rfind(self._form.marks[0]) if self._after_call else 0
        text, self._marks = self._marks[place:] if place >= 0 else "", ""
        return text

    def _call(self, value: Any) -> Call | None:
        if not isinstance(value, dict):
            return None
        name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return Call(name, arguments)


def _decoded(text: str) -> tuple[Any, int]:
    """The JSON value with which a text begins, and where it ends: 0 if it is not whole, or no JSON."""
    try:
        return json.JSONDecoder(strict=False).raw_decode(text)
    except (ValueError, RecursionError):
        return None, 0
