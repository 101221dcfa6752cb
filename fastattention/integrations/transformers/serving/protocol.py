"""Requests as clients send them. Whatever is not served is refused with a sentence."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from fastattention.integrations.transformers.serving.errors import RequestError

MOST_CHOICES = 128
MOST_LOGPROBS = 20

# Values of parameters that are not served with which they ask for nothing. Other values are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
}
# Clients write null for a default of these.
_DEFAULT_IF_NULL = (
    "n", "presence_penalty", "frequency_penalty", "ignore_eos", "logprobs", "echo", "min_tokens", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens",
)  # fmt: skip
# Parameters that change no answer.
_NO_EFFECT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip

_Model = TypeVar("_Model", bound=BaseModel)


def read(model: type[_Model], body: bytes) -> _Model:
    """The request in a body. Raises RequestError (400) that names the parameter and what is allowed."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise RequestError(400, f"the body must be a JSON object, got {type(given).__name__}")
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "missing":
            message = f"{param} is missing"
        elif first["type"] == "extra_forbidden":
            message = f"{param} is not a parameter of this endpoint"
        elif first["type"] in ("value_error", "assertion_error"):
            message = str(first["ctx"]["error"])
        else:
            message = f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {_shortened(first['input'])}"
        raise RequestError(400, message, param) from error


def _shortened(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Strict):
    """What a stream holds besides text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False  # with include_usage: in every event
    include_obfuscation: bool = False  # changes nothing here: no obfuscation is sent


def _as_list(value: object) -> object:
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return value
    raise ValueError(f"stop must be a string or a list of strings, got {_shortened(value)}")


def _as_biases(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias must be an object from token ids to numbers, got {_shortened(value)}")
    found = {}
    for token, bias in value.items():
        if not (str(token).isascii() and str(token).isdecimal()):
            raise ValueError(f"logit_bias: {_shortened(token)} must be a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias: {_shortened(bias)} must be a number from -100 to 100")
        found[int(token)] = float(bias)
    return found


class GenerationRequest(_Strict):
    """Parameters that both endpoints share. None takes the model's default."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)  # 0 and -1 take all tokens
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list, max_length=16)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_as_biases)] = Field(default_factory=dict)
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)  # before as many, nothing ends the answer
    stop_token_ids: list[int] = Field(default_factory=list, max_length=128)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    response_format: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {name: value for name, value in given.items() if name not in _NO_EFFECT}
        for name, allowed in _NEUTRAL.items():
            if name in kept and name not in cls.model_fields and (value := kept.pop(name)) not in allowed:
                raise ValueError(f"{name}={_shortened(value)} is not served; leave it out")
        for name in _DEFAULT_IF_NULL:
            if name in kept and kept[name] is None:
                del kept[name]
        return kept

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: list[str]) -> list[str]:
        if "" in stop:
            raise ValueError("stop must not hold an empty string")
        return stop

    @model_validator(mode="after")
    def _check_together(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.min_tokens > (self.min_tokens if self.wanted_tokens is None else self.wanted_tokens):
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.wanted_tokens}")
        if self.min_tokens and self.response_format not in (None, {"type": "text"}):
            raise ValueError(f"min_tokens={self.min_tokens} is not served with response_format, which ends the answer")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of an answer at most. None: as many as fit."""
        return self.max_tokens

    @property
    def answer_schema(self) -> dict[str, Any] | None:
        """The JSON schema that the answer must follow. Raises RequestError for formats that are not served."""
        given = self.response_format or {"type": "text"}
        if given.get("type") == "text":
            return None
        if given.get("type") == "json_object":
            return {"type": "object"}
        if given.get("type") == "json_schema":
            schema = given.get("json_schema")
            schema = schema.get("schema") if isinstance(schema, dict) else None
            if isinstance(schema, dict):
                return schema
            raise RequestError(400, "response_format: json_schema.schema must be a JSON schema", "response_format")
        raise RequestError(
            400,
            f"response_format.type={_shortened(given.get('type'))} must be text, json_object or json_schema",
            "response_format",
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    default_tokens: ClassVar[int] = 16  # as in OpenAI's API
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt, list) and prompt:
            if all(type(one) is str for one in prompt) or all(type(one) is int for one in prompt):
                return prompt
            if all(isinstance(one, list) and all(type(token) is int for token in one) for one in prompt):
                return prompt
        raise ValueError(
            f"prompt must be a string, a list of strings, token ids, or a list of these, got {_shortened(prompt)}"
        )

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, got 0; 0 needs echo=true")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo is not served with logprobs: log probabilities of prompts are not computed")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one for each answer."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of an answer at most."""
        return self.default_tokens if self.max_tokens is None else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report with each token. None: no log probabilities."""
        return self.logprobs


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages", mode="after")
    @classmethod
    def _check_messages(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]

    @model_validator(mode="after")
    def _check_choices(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.tool_choice not in (None, "auto", "none"):
            raise ValueError(f"tool_choice={_shortened(self.tool_choice)} is not served; use 'auto' or 'none'")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of an answer at most. None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report with each token. None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id")


def _message(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """A message for the chat template. Raises ValueError for what it cannot hold."""
    if given.get("role") not in ROLES:
        raise ValueError(f"{where}.role must be one of {', '.join(ROLES)}, got {_shortened(given.get('role'))}")
    kept = {name: value for name, value in given.items() if value not in (None, [], {})}
    for name in kept.keys() - set(_MESSAGE_FIELDS):
        raise ValueError(f"{where}.{name} is not served; leave it out")
    kept["content"] = _content(f"{where}.content", kept.get("content"))
    if kept["content"] is None and "tool_calls" not in kept:
        raise ValueError(f"{where}.content is missing")
    if kept["role"] == "developer":  # OpenAI's later name of the role that templates know as "system"
        kept["role"] = "system"
    if "tool_calls" in kept:
        kept["tool_calls"] = [_tool_call(f"{where}.tool_calls", call) for call in kept["tool_calls"]]
    return kept


def _content(where: str, given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise ValueError(f"{where} must be a string or a list of text parts, got {_shortened(given)}")
    texts = []
    for part in given:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a part of type {_shortened(kind)}; this server takes text only")
        texts.append(part["text"])
    return "".join(texts)


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, as chat templates expect. Clients send them as a string of JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where} must hold objects with function.name, got {_shortened(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where}: function.arguments is not JSON: {error}") from error
    return {**call, "function": {**function, "arguments": arguments}}
