"""What the server refuses, and models that cannot be served."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DeepseekV2Config, DeepseekV2ForCausalLM, T5Config
from word_model import words

from fastattention.errors import ArgumentError
from fastattention.integrations.transformers.serving.app import Limits, _Guard
from fastattention.integrations.transformers.serving.server import Settings, load
from integrations.asgi import Reply, call
from integrations.serving_models import KEY, POSITIONS, VOCABULARY, Served, prompts, serve

PROMPT = prompts()[4]
WAITING, REQUEST_BYTES = 8, 100_000


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    found = serve(folder, limits=Limits(request_bytes=REQUEST_BYTES, waiting=WAITING))
    yield found
    found.service.engine.stop(10)


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "t3", **message}]}


IMAGE = [{"type": "text", "text": "t3"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
AUDIO = [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CONFIGS = {
    "{": "generation_config must be a JSON object in a string, got '{'",
    "[]": "generation_config must be a JSON object",
    '{"num_beams": 4}': "generation_config: num_beams=4 is not served",
    '{"max_new_tokens": 0}': "max_tokens: input should be greater than or equal to 1, got 0",
}
BAD_CHATS: list[tuple[Any, str | None, str]] = [
    ({}, "messages", "messages is missing"),
    ({"messages": 3}, "messages", "got 3"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "t3"}, "messages", "list"),
    ({"messages": ["t3"]}, "messages.0", "'t3'"),
    ({"messages": [{"content": "t3"}]}, "messages", "messages[0].role must be one of system,"),
    (said(role="robot"), "messages", "got 'robot'"),
    (said(content=3), "messages", "messages[0].content must be a string"),
    (said(content=None), "messages", "messages[0].content is missing"),
    (said(content=IMAGE), "messages", "part of type 'image_url'; this server takes text only"),
    (said(content=AUDIO), "messages", "part of type 'input_audio'"),
    (said(role="assistant", audio={"id": "1"}), "messages", "messages[0].audio is not served"),
    (said(role="assistant", tool_calls=[CALL]), "messages", "function.arguments is not JSON"),
    (said(role="assistant", tool_calls=3), "messages", "messages[0].tool_calls must be a list, got 3"),
    ({**said(), "tools": TOOLS}, "tools", "takes no tools"),
    ({**said(), "tool_choice": "required"}, None, "tool_choice='required' needs tools"),
    ({**said(), "tool_choice": "any"}, None, "tool_choice='any' is not served; use 'auto', 'none', 'required' or"),
    (
        {**said(), "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        None,
        "tools lack 'g'",
    ),
    (
        {**said(), "tools": TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        None,
        "is not served; use",
    ),
    ({**said(), "tools": TOOLS, "tool_choice": "required", "min_tokens": 1}, None, "not served with min_tokens"),
    ({**said(), "tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function is missing"),
    ({**said(), "tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools.0.type", "'function', got 'custom'"),
    ({**said(), "echo": True}, None, "echo=True is not served"),
    ({**said(), "max_tokens": 0}, "max_tokens", "greater than or equal to 1, got 0"),
    ({**said(), "max_completion_tokens": 1, "min_tokens": 2}, None, "min_tokens=2 must be at most max_tokens=1"),
    ({**said(), "top_logprobs": 2}, None, "top_logprobs needs logprobs=true"),
    ({**said(), "logprobs": 3}, "logprobs", "boolean"),
    ({**said(), "reasoning_effort": "high"}, None, "reasoning_effort='high' is not served"),
    ({**said(), "response_format": {"type": "xml"}}, "response_format", "must be text, json_object or json_schema"),
    ({**said(), "response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
    ({**said(), "response_format": {"type": "json_object"}}, "response_format", "cannot read this model's tokenizer"),
    ({**said(), "chat_template": "{{ 3 }}"}, "chat_template", "chat_template is not a parameter of this endpoint"),
    (
        {**said(), "chat_template_kwargs": {"chat_template": "t3"}},
        "chat_template_kwargs",
        "must not have chat_template",
    ),
]


@pytest.mark.parametrize(("text", "message"), CONFIGS.items())
def test_a_bad_generation_config_is_refused_with_the_reason(served: Served, text: str, message: str) -> None:
    reply = served.ask("/v1/chat/completions", {**said(), "generation_config": text})
    assert reply.status == 400
    assert message in reply.error["message"]


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS, ids=[message for *_, message in BAD_CHATS])
def test_a_bad_chat_is_refused_with_the_reason(served: Served, body: Any, param: str | None, message: str) -> None:
    reply = served.ask("/v1/chat/completions", body)
    assert reply.status == 400
    assert message in reply.error["message"]
    assert reply.error["param"] == param


LONG = [3] * POSITIONS
BAD_COMPLETIONS: list[tuple[Any, str]] = [
    (b"{", "the body is not JSON"),
    (b"", "the body is not JSON"),
    (b"[" * 50_000, "the body is not JSON"),
    (b"\xff", "the body is not JSON"),
    (b'{"prompt": "\\ud800"}', "prompt is not text"),
    (b'{"prompt": "t3", "\\ud800": 1}', "input should be a valid string"),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "prompt must be"),
    (b'{"prompt": "t3", "response_format": {"type": ' + b"[" * 900 + b"]" * 900 + b"}}", ""),
    ([], "must be a JSON object, got list"),
    ({"max_tokens": 3}, "prompt is missing"),
    ({"prompt": 3}, "prompt must be a string, a list"),
    ({"prompt": []}, "prompt must be"),
    ({"prompt": ["t3", 3]}, "prompt must be"),
    ({"prompt": [True]}, "prompt must be"),
    ({"prompt": ""}, "the prompt has 0 tokens"),
    ({"prompt": [[3], []]}, "the prompt has 0 tokens"),
    ({"prompt": [VOCABULARY]}, f"token {VOCABULARY} must be 0 to {VOCABULARY - 1}"),
    ({"prompt": [-1]}, "token -1 must be"),
    ({"prompt": words(LONG)}, f"the prompt has {POSITIONS} tokens; this server takes 1 to {POSITIONS - 1}"),
    ({"prompt": LONG}, f"the prompt has {POSITIONS} tokens"),
    ({"prompt": "t3", "max_tokens": "many"}, "max_tokens: input should be a valid integer, got 'many'"),
    ({"prompt": "t3", "max_tokens": 0}, "max_tokens must be at least 1, got 0; 0 needs echo=true"),
    ({"prompt": "t3", "max_tokens": -1, "echo": True}, "greater than or equal to 0, got -1"),
    ({"prompt": "t3", "min_tokens": 17}, "min_tokens=17 must be at most max_tokens=16"),
    ({"prompt": "t3", "min_tokens": 2, "response_format": {"type": "json_object"}}, "not served with response_format"),
    ({"prompt": "t3", "stop_token_ids": [999]}, f"stop_token_ids: token 999 must be 0 to {VOCABULARY - 1}"),
    ({"prompt": "t3", "stop_token_ids": [-1]}, "stop_token_ids: token -1 must be"),
    ({"prompt": "t3", "stop_token_ids": 3}, "stop_token_ids"),
    ({"prompt": "t3", "skip_special_tokens": "no"}, "skip_special_tokens: input should be a valid boolean, got 'no'"),
    ({"prompt": "t3", "temperature": -1}, "temperature"),
    ({"prompt": "t3", "temperature": "hot"}, "temperature: input should be a valid number, got 'hot'"),
    (b'{"prompt": "t3", "temperature": NaN}', "temperature"),
    ({"prompt": "t3", "top_p": 0}, "top_p"),
    ({"prompt": "t3", "min_p": 2}, "min_p"),
    ({"prompt": "t3", "top_k": -2}, "top_k"),
    ({"prompt": "t3", "n": 0}, "n: "),
    ({"prompt": "t3", "n": WAITING + 1}, f"this server takes {WAITING} at once"),
    ({"prompt": "t3", "seed": 0.5}, "seed"),
    ({"prompt": "t3", "stop": [3]}, "stop must be a string or a list of strings"),
    ({"prompt": "t3", "stop": ""}, "stop must not hold an empty string"),
    ({"prompt": "t3", "presence_penalty": 3}, "presence_penalty"),
    ({"prompt": "t3", "logit_bias": {"t4": 3}}, "logit_bias: 't4' must be a token id"),
    ({"prompt": "t3", "logit_bias": {"4": 300}}, "logit_bias: 300 must be a number from -100 to 100"),
    ({"prompt": "t3", "logit_bias": {"999": 3}}, "logit_bias: token 999"),
    ({"prompt": "t3", "logprobs": 21}, "logprobs"),
    ({"prompt": "t3", "best_of": 3}, "best_of=3 is not served"),
    ({"prompt": "t3", "suffix": "t4"}, "suffix='t4' is not served"),
    ({"prompt": "t3", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "t3", "stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
    ({"prompt": "t3", "generation_config": "{}"}, "generation_config is not a parameter of this endpoint"),
    ({"prompt": "t3", "messages": []}, "messages is not a parameter of this endpoint"),
]


@pytest.mark.parametrize(("body", "message"), BAD_COMPLETIONS, ids=[f"{at}" for at in range(len(BAD_COMPLETIONS))])
def test_a_bad_completion_is_refused_with_the_reason(served: Served, body: Any, message: str) -> None:
    reply = served.ask("/v1/completions", body)
    assert reply.status == 400
    assert message in reply.error["message"]
    assert reply.error["type"] == "invalid_request_error"


def test_parameters_that_ask_for_nothing_are_taken(served: Served) -> None:
    neutral = {
        "n": None, "frequency_penalty": 0, "presence_penalty": 0.0, "stop": None, "logprobs": None, "user": "me",
        "best_of": 1, "echo": False, "suffix": None, "logit_bias": None, "seed": None, "model": "tiny", "stream": None,
        "response_format": {"type": "text"}, "metadata": {"a": "b"}, "repetition_penalty": 1.0, "top_k": -1,
        "min_tokens": 0, "stop_token_ids": None, "include_stop_str_in_output": False, "skip_special_tokens": True,
    }  # fmt: skip
    assert served.tokens(PROMPT, **neutral) == served.greedy(PROMPT)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/load_model", {"model": "another"}, 404),
        ("/load_model", {}, 400),
        ("/reset", {}, 404),
        ("/v1/responses/resp_1", None, 404),
        ("/v1/audio/transcriptions", b"--x", 404),
        ("/v1/completions", None, 405),
        ("/v1/completions", {"prompt": "t3", "model": "another"}, 404),
        ("/v1/models/another", None, 404),
    ],
)
def test_there_is_one_model_and_nothing_else(served: Served, path: str, body: Any, status: int) -> None:
    reply = served.ask(path, body)
    assert reply.status == status
    assert reply.error["message"]


def test_the_model_and_the_health_are_told(served: Served) -> None:
    [model] = served.ask("/v1/models").json["data"]
    assert model == served.ask("/v1/models/tiny").json
    assert (model["id"], model["max_model_len"]) == ("tiny", POSITIONS)
    assert served.ask("/health").json == {"status": "ok"}


def test_the_metrics_count(served: Served) -> None:
    def counted() -> dict[str, float]:
        lines = served.ask("/metrics").body.decode().splitlines()
        return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"}

    before = counted()
    served.complete(PROMPT, n=2)
    assert served.ask("/v1/completions", {"prompt": 3}).status == 400
    found = counted()
    refused = 'fastattention_requests_total{endpoint="/v1/completions",status="400"}'
    assert found[refused] - before.get(refused, 0.0) == 1
    ended = 'fastattention_requests_total{endpoint="/v1/completions",status="200"}'
    assert found[ended] - before.get(ended, 0.0) == 1
    assert found["fastattention_generated_tokens_total"] - before["fastattention_generated_tokens_total"] == 16
    assert found["fastattention_prompt_tokens_total"] - before["fastattention_prompt_tokens_total"] == len(PROMPT)
    assert found["fastattention_running"] == found["fastattention_waiting"] == 0


@pytest.mark.parametrize(("given", "status"), [(None, 401), ("Bearer no", 401), (KEY, 401), (f"Bearer {KEY}", 200)])
def test_a_key_is_asked_for_everywhere_but_for_health(served: Served, given: str | None, status: int) -> None:
    app, headers = _Guard(served.service.app(), KEY), {} if given is None else {"Authorization": given}
    reply = asyncio.run(call(app, "/v1/models", headers=headers))
    assert reply.status == status
    if status == 401:
        assert reply.error["code"] == "invalid_api_key"
    assert asyncio.run(call(app, "/metrics", headers=headers)).status == status
    assert asyncio.run(call(app, "/health")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Length": "many"}, 400),
        ({"Content-Length": "-1"}, 400),
        ({"Content-Length": "+1"}, 400),
        ({"Content-Length": "\u00b2"}, 400),
        ({"Content-Length": "9" * 5000}, 413),
        ({"Host": "[::1"}, 200),
        ({"Host": "a b/\u00e9:x"}, 200),
        ({"Authorization": "\u00e9", "Content-Type": "\u00e9; charset=", "Accept": "\u00e9"}, 200),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Cookie": '"', "Range": "bytes=x", "If-Modified-Since": "x", "Expect": "x"}, 200),
    ],
    ids=str,
)
def test_a_malformed_header_fails_nothing(served: Served, headers: dict[str, str], status: int) -> None:
    async def ask() -> list[Reply]:
        body = {"prompt": "t3", "max_tokens": 1}
        app, paths = served.service.app(), ("/v1/completions", "/no", "/health/")
        return [await call(app, path, body, headers=headers, parts=2) for path in paths]

    first, *others = asyncio.run(ask())
    assert first.status == status
    assert status == 200 or first.error["message"]
    assert all(reply.status in (307, 404, 405) for reply in others)


@pytest.mark.parametrize("parts", [1, 7], ids=["with its length", "in parts"])
def test_a_body_that_is_too_large_is_not_read(served: Served, parts: int) -> None:
    reply = served.ask("/v1/completions", {"prompt": "t3 " * REQUEST_BYTES}, parts=parts)
    assert reply.status == 413
    assert f"more than {REQUEST_BYTES} bytes" in reply.error["message"]


def test_a_text_of_too_many_characters_is_not_split_into_tokens(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split(*_: Any, **__: Any) -> None:
        raise AssertionError("the text was split into tokens")

    monkeypatch.setattr(type(served.service._tokenizer), "__call__", split)
    text = "t3 " * (64 * POSITIONS // 3 + 1)
    for path, body in (
        ("/v1/completions", {"prompt": text}), ("/v1/chat/completions", said(content=text)),
    ):  # fmt: skip
        reply = served.ask(path, body)
        assert reply.status == 400
        assert "characters" in reply.error["message"]
        assert reply.error["code"] == "context_length_exceeded"


def test_others_are_answered_while_a_text_is_split(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    complete = served.service._prompts.complete

    def slow(prompt: Any) -> list[int]:
        begun.set()
        assert go_on.wait(60)
        return complete(prompt)

    monkeypatch.setattr(served.service._prompts, "complete", slow)

    async def ask() -> Reply:
        app = served.service.app()
        asked = asyncio.ensure_future(call(app, "/v1/completions", {"prompt": "t3"}))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        assert (await call(app, "/health")).status == 200
        go_on.set()
        return await asked

    assert asyncio.run(ask()).status == 200


# Models that cannot be served


def test_a_model_that_batching_cannot_hold_is_refused(tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
        n_group=1, topk_group=1,
    )  # fmt: skip
    DeepseekV2ForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="a DeepseekV2ForCausalLM cannot be batched"):
        load(Settings(str(tmp_path), device="cpu", kv_memory=4 << 20), print)


def test_code_of_a_model_is_not_run_unless_asked(tmp_path: Path, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('the code was run')")
    with pytest.raises(ArgumentError, match="cannot be loaded"):
        load(Settings(str(tmp_path), device="cpu"), print)


def test_a_model_without_text_to_continue_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="has a T5Config; only text models are served"):
        load(Settings(str(tmp_path), device="cpu"), print)
