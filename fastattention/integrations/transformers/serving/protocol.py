"""Requests as clients send them. Whatever is not served is refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from fastattention.integrations.transformers.serving.errors import RequestError, shortened
from fastattention.integrations.transformers.serving.messages import message_for_template

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
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
}
# Clients write null for a default of these.
_DEFAULT_IF_NULL = (
    "n", "presence_penalty", "frequency_penalty", "ignore_eos", "logprobs", "echo", "min_tokens", "stop_token_ids",
    "include_stop_str_in_output", "skip_special_tokens", "parallel_tool_calls",
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
    return checked(model, given)


def checked(model: type[_Model], given: dict[str, Any]) -> _Model:
    """The request with these parameters. Raises RequestError (400)."""
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
            message = f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}, got {shortened(first['input'])}"
        raise RequestError(400, message, param) from error


def without_neutral(
    given: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]], served: Collection[str] = ()
) -> dict[str, Any]:
    """What was given, without parameters that change no answer. Raises ValueError for those that would.

    neutral: values of parameters with which they ask for nothing; served: parameters that are not looked at
    """
    kept = {name: value for name, value in given.items() if name not in _NO_EFFECT}
    for name, allowed in neutral.items():
        if name in kept and name not in served and (value := kept.pop(name)) not in allowed:
            raise ValueError(f"{name}={shortened(value)} is not served; leave it out")
    return kept


class Strict(BaseModel):
    """Parameters have the names and types that are declared."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class ModelRequest(Strict):
    """POST /load_model."""

    model: str


class StreamOptions(Strict):
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
    raise ValueError(f"stop must be a string or a list of strings, got {shortened(value)}")


def _as_biases(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"logit_bias must be an object from token ids to numbers, got {shortened(value)}")
    found = {}
    for token, bias in value.items():
        if not (str(token).isascii() and str(token).isdecimal()):
            raise ValueError(f"logit_bias: {shortened(token)} must be a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"logit_bias: {shortened(bias)} must be a number from -100 to 100")
        found[int(token)] = float(bias)
    return found


class GenerationRequest(Strict):
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
        kept = without_neutral(given, _NEUTRAL, cls.model_fields)
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
            f"response_format.type={shortened(given.get('type'))} must be text, json_object or json_schema",
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
            f"prompt must be a string, a list of strings, token ids, or a list of these, got {shortened(prompt)}"
        )

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, got 0; 0 needs echo=true")
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


class _Function(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str = Field(min_length=1, max_length=256)
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"] = "function"
    function: _Function


# Names in a GenerationConfig of Transformers, and ours.
_CONFIG_NAMES = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "temperature": "temperature", "top_p": "top_p",
    "top_k": "top_k", "min_p": "min_p", "repetition_penalty": "repetition_penalty",
}  # fmt: skip


def _of_generation_config(text: object) -> dict[str, Any]:
    """The parameters in a GenerationConfig, which `transformers chat` sends as a string of JSON."""
    try:
        config = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"generation_config must be a JSON object in a string, got {shortened(text)}")
    given = {name: value for name, value in config.items() if value is not None and name != "transformers_version"}
    sampled = given.pop("do_sample", None)
    found: dict[str, Any] = {} if sampled is None else {"temperature": 1.0 if sampled else 0.0}
    for name, value in given.items():
        if name not in _CONFIG_NAMES:
            raise ValueError(f"generation_config: {name}={shortened(value)} is not served; leave it out")
        if name != "temperature" or sampled is not False:
            found[_CONFIG_NAMES[name]] = value
    return found


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[_Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_generation_config(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("generation_config") is None:
            return given
        others = {name: value for name, value in given.items() if name != "generation_config" and value is not None}
        return {**_of_generation_config(given["generation_config"]), **others}

    @field_validator("messages", mode="after")
    @classmethod
    def _check_messages(cls, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [message_for_template(f"messages[{index}]", message) for index, message in enumerate(messages)]

    @model_validator(mode="after")
    def _check_choices(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.tool_choice in (None, "auto", "none"):
            return self
        name = self._named_tool
        if name is None and self.tool_choice != "required":
            allowed = "'auto', 'none', 'required' or a function of tools"
            raise ValueError(f"tool_choice={shortened(self.tool_choice)} is not served; use {allowed}")
        if not self.required_tools:
            raise ValueError("tool_choice='required' needs tools" if name is None else f"tools lack {shortened(name)}")
        if self.min_tokens or self.response_format not in (None, {"type": "text"}):
            raise ValueError("tool_choice is not served with min_tokens or response_format where a call is required")
        return self

    @property
    def _named_tool(self) -> str | None:
        """The tool that must be called."""
        choice = self.tool_choice if isinstance(self.tool_choice, dict) else {}
        function = choice.get("function") if choice.keys() == {"type", "function"} else None
        name = function.get("name") if isinstance(function, dict) and choice["type"] == "function" else None
        return name if isinstance(name, str) else None

    @property
    def described_tools(self) -> list[dict[str, Any]]:
        """The tools as the client sent them."""
        return [one.model_dump(exclude_unset=True) for one in self.tools or ()]

    @property
    def required_tools(self) -> list[dict[str, Any]]:
        """The functions one of which the answer must call, if any must be."""
        if self.tool_choice in (None, "auto", "none"):
            return []
        functions = [one["function"] for one in self.described_tools]
        return [one for one in functions if self._named_tool in (None, one["name"])]

    @property
    def most_calls(self) -> int | None:
        """Calls in an answer at most. None: any number."""
        return None if self.parallel_tool_calls and self._named_tool is None else 1

    @property
    def wanted_tokens(self) -> int | None:
        """Tokens of an answer at most. None: as many as fit."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """Alternatives to report with each token. None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None
