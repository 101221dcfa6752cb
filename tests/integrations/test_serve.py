"""The server's answers: what each parameter of a request does, in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import torch
from transformers import GenerationConfig
from word_model import words

from fastattention.integrations.transformers.serving.app import Limits, _Guard
from integrations.serving_models import KEY, POSITIONS, VOCABULARY, Served, prompts, serve

PROMPT = prompts()[4]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    found = serve(folder, limits=Limits(request_bytes=100_000, waiting=32))
    yield found
    found.service.engine.stop(10)


def chat(text: str, **body: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 8, **body}


# Tokens


def test_requests_at_once_are_greedy_as_generate_is_or_sample(served: Served) -> None:
    options: list[dict[str, Any]] = [{}, {"temperature": 2.0}, {"temperature": 0, "top_p": 0.5, "seed": 3}]
    bodies = [{"prompt": words(one), "max_tokens": 8, **option} for one in prompts() for option in options]
    found = [reply.json["choices"][0]["text"] for reply in served.ask_all("/v1/completions", bodies)]
    expected = [" " + words(served.greedy(one)) for one in prompts()]
    assert found[0::3] == expected
    assert found[2::3] == expected
    assert sum(one != other for one, other in zip(found[1::3], expected, strict=True)) > 4


def test_a_long_prompt_in_chunks_is_continued_as_generate_does(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [3 + index % 190 for index in range(POSITIONS - 20)]
    monkeypatch.setattr(served.service.engine._batch, "max_batch_tokens", 64)
    assert served.tokens(prompt) == served.greedy(prompt)


PROMPT_FORMS = [words(PROMPT), [words(PROMPT), "t7 t8"], PROMPT, [PROMPT, [7, 8]]]


@pytest.mark.parametrize("form", PROMPT_FORMS, ids=["string", "strings", "tokens", "lists of tokens"])
def test_prompts_have_every_form_of_the_api(served: Served, form: Any) -> None:
    found = served.complete(form)
    expected = [PROMPT, [7, 8]][: 2 if isinstance(form[0], list) or form == PROMPT_FORMS[1] else 1]
    assert [one["text"].split() for one in found["choices"]] == [words(served.greedy(one)).split() for one in expected]
    assert [one["index"] for one in found["choices"]] == list(range(len(expected)))
    assert found["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert found["usage"]["completion_tokens"] == 8 * len(expected)


def test_a_chat_is_answered_by_the_template(served: Served) -> None:
    parts = [{"type": "text", "text": "t5 "}, {"type": "text", "text": "t6"}]
    messages = [{"role": "developer", "content": "t3 t4"}, {"role": "user", "content": parts}]
    found = served.ask("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 8}).json
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["choices"][0]["message"]["content"].split() == words(served.greedy([3, 4, 5, 6])).split()
    assert found["choices"][0]["finish_reason"] == "length"


def test_a_seed_repeats_an_answer_beside_others(served: Served) -> None:
    options = {"temperature": 1.5, "seed": 7}
    alone = served.text(PROMPT, **options)
    bodies = [{"prompt": one, "max_tokens": 8, **options} for one in (PROMPT, [9, 8, 7], PROMPT)]
    found = [reply.json["choices"][0]["text"] for reply in served.ask_all("/v1/completions", bodies)]
    assert found[0] == found[2] == alone
    assert len({served.text(PROMPT, temperature=1.5, seed=seed) for seed in range(5)}) > 3


def test_n_gives_different_answers_that_a_seed_repeats(served: Served) -> None:
    found = served.complete([PROMPT, [7, 8]], n=3, temperature=1.5, seed=1)["choices"]
    assert [one["index"] for one in found] == list(range(6))
    assert len({one["text"] for one in found}) == 6
    again = served.complete([PROMPT, [7, 8]], n=3, temperature=1.5, seed=1)["choices"]
    assert found == again


def test_choices_of_a_long_prompt_share_its_pages(served: Served) -> None:
    prompt = [3 + index * 11 % 190 for index in range(300)]
    found = served.complete(prompt, n=2)
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert found["choices"][0]["text"] == found["choices"][1]["text"]
    expected = [token for token in served.greedy(prompt) if token > 2]  # special tokens have no text
    assert found["choices"][0]["text"].split() == words(expected).split()
    assert served.complete(prompt)["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_a_cut_to_one_token_is_greedy(served: Served, options: dict[str, Any]) -> None:
    assert served.tokens(PROMPT, temperature=3.0, **options) == served.greedy(PROMPT)


def test_a_bias_forces_and_forbids_tokens(served: Served) -> None:
    assert served.tokens(PROMPT, logit_bias={"17": 100}) == [17] * 8
    forbidden = {str(token): -100 for token in set(served.greedy(PROMPT))}
    assert not set(served.tokens(PROMPT, logit_bias=forbidden)) & set(served.greedy(PROMPT))


@pytest.mark.parametrize("options", [{"presence_penalty": 1.5}, {"frequency_penalty": 0.75}], ids=str)
def test_penalties_follow_the_formula_of_openai(served: Served, options: dict[str, float]) -> None:
    bias = {"17": 12.0, "18": 11.0, "19": 10.0}  # makes tokens come back
    prompt = [*PROMPT, 17, 18]  # does not count
    tokens = list(prompt)
    for _ in range(12):
        with torch.no_grad():
            scores = served.eager(torch.tensor([tokens])).logits[0, -1]
        for token, value in bias.items():
            scores[int(token)] += value
        counts = torch.bincount(torch.tensor(tokens[len(prompt) :], dtype=torch.int64), minlength=VOCABULARY)
        scores -= counts * options.get("frequency_penalty", 0.0)
        scores -= (counts > 0) * options.get("presence_penalty", 0.0)
        tokens.append(int(scores.argmax()))
    found = served.tokens(prompt, max_tokens=12, logit_bias=bias, **options)
    assert found == tokens[len(prompt) :]
    assert found != served.tokens(prompt, max_tokens=12, logit_bias=bias)


def test_a_repetition_penalty_is_that_of_generate(served: Served) -> None:
    ids = torch.tensor([PROMPT])
    expected = served.eager.generate(ids, max_new_tokens=40, do_sample=False, repetition_penalty=3.0)[0, len(PROMPT) :]
    assert served.tokens(PROMPT, max_tokens=40, repetition_penalty=3.0) == expected.tolist()
    assert expected.tolist() != served.greedy(PROMPT, 40)


def test_a_model_that_samples_by_default_does_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = served.service._defaults
    for name, value in (("do_sample", True), ("temperature", 3.0), ("top_k", 50)):
        monkeypatch.setattr(defaults, name, value)
    given = {"temperature": 3.0, "top_k": 50, "seed": 1}
    assert served.text(PROMPT, seed=1) == served.text(PROMPT, **given)
    assert served.tokens(PROMPT, temperature=0) == served.greedy(PROMPT)


def test_tools_and_calls_come_to_the_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for one in messages %}{{ one.content or one.tool_calls[0].function.arguments.word }} {% endfor %}"
    )
    monkeypatch.setattr(served.service._tokenizer, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "t9", "arguments": '{"word": "t5"}'}}
    messages = [
        {"role": "user", "content": "t4"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None},
        {"role": "tool", "content": "t6", "tool_call_id": "1"},
    ]
    tools = [{"type": "function", "function": {"name": "t8", "parameters": {"type": "object"}}}]
    reply = served.ask("/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 8})
    assert reply.json["choices"][0]["message"]["content"].split() == words(served.greedy([8, 4, 5, 6])).split()
    reply = served.ask("/v1/chat/completions", {"messages": messages, "tools": tools, "tool_choice": "none"})
    assert reply.json["usage"]["prompt_tokens"] == 3
    monkeypatch.setattr(served.service._tokenizer, "chat_template", "{{ word }} t4")
    reply = served.ask("/v1/chat/completions", chat("t3", chat_template_kwargs={"word": "t7"}))
    assert reply.json["choices"][0]["message"]["content"].split() == words(served.greedy([7, 4])).split()


def test_a_chat_of_transformers_is_served(served: Served) -> None:
    """It asks for the model first, and sends its parameters as a GenerationConfig."""
    assert served.ask("/load_model", {"model": "tiny"}).body == b'data: {"status": "ready", "cached": true}\n\n'

    def said(**config: Any) -> str:
        body = {"messages": [{"role": "user", "content": words(PROMPT)}], "max_tokens": None}
        text = GenerationConfig(max_new_tokens=8, **config).to_json_string()
        reply = served.ask("/v1/chat/completions", {**body, "seed": 1, "generation_config": text})
        return str(reply.json["choices"][0]["message"]["content"])

    greedy = words(served.greedy(PROMPT))
    assert said(do_sample=False).split() == greedy.split()
    assert said(do_sample=False, temperature=2.0) == said() == said(do_sample=True, top_k=1)
    assert said(do_sample=True, temperature=3.0) == " " + served.text(PROMPT, temperature=3.0, seed=1).strip()
    assert said(do_sample=True, temperature=3.0).split() != greedy.split()


# Ends


def test_a_stop_string_across_tokens_ends_the_text_before_it(served: Served) -> None:
    one, two, three, four, *_ = words(served.greedy(PROMPT)).split()
    stop = f"{two[1:]} {three} {four[0]}"
    for stream in (False, True):
        reply = served.ask("/v1/completions", {"prompt": PROMPT, "stop": [stop, "t"], "stream": stream})
        choices = reply.events if stream else [reply.json]
        assert "".join(each["choices"][0]["text"] for each in choices) == " "
        reply = served.ask("/v1/completions", {"prompt": PROMPT, "stop": stop, "stream": stream})
        choices = reply.events if stream else [reply.json]
        assert "".join(each["choices"][0]["text"] for each in choices) == f" {one} t"
        assert choices[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_that_does_not_come_takes_nothing(served: Served) -> None:
    *_, last = served.text(PROMPT)
    assert served.text(PROMPT, stop=[f"{last}x"]) == served.text(PROMPT)


def test_an_end_token_ends_unless_it_is_ignored(served: Served) -> None:
    bias = {"2": 100}  # </s>
    found = served.complete(PROMPT, logit_bias=bias)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("", "stop")
    assert found["usage"]["completion_tokens"] == 1
    found = served.complete(PROMPT, logit_bias=bias, ignore_eos=True)
    assert (found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]) == (8, "length")


def test_a_stop_token_ends_and_is_shown_on_demand(served: Served) -> None:
    """An end token is special: it has no text unless special tokens do."""
    one, two, three, *_ = words(served.greedy(PROMPT)).split()
    stop = {"stop_token_ids": [int(three[1:])]}
    shown = {"include_stop_str_in_output": True}
    end = {"logit_bias": {"2": 100}}
    for expected, body in (
        (f" {one} {two}", stop),
        (f" {one} {two}", {**stop, "ignore_eos": True}),
        (f" {one} {two} {three}", {**stop, **shown}),
        (f" {one} {two}", {"stop": two, **shown}),
        ("", {**end, **shown}),
        ("", {**end, "skip_special_tokens": False}),
        (" </s>", {**end, **shown, "skip_special_tokens": False}),
    ):
        choice = served.complete(PROMPT, **body)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop"), body
    assert served.text(PROMPT, **end, ignore_eos=True, skip_special_tokens=False) == " </s>" * 8


def test_nothing_ends_an_answer_before_min_tokens(served: Served) -> None:
    first, second, third, *_ = served.greedy(PROMPT)
    found = served.complete(PROMPT, logit_bias={"2": 100}, min_tokens=3)
    assert found["usage"]["completion_tokens"] == 4
    assert not {"</s>", f"t{third}"} & set(served.text(PROMPT, stop_token_ids=[third], min_tokens=8).split())
    found = served.complete(PROMPT, stop=[f"t{first}", f"t{third}"], min_tokens=2)["choices"][0]
    assert (found["text"], found["finish_reason"]) == (f" t{first} t{second} ", "stop")


def test_an_answer_ends_where_the_room_does(served: Served) -> None:
    found = served.complete([3, 4] * (POSITIONS // 2 - 5), max_tokens=100)
    assert found["usage"]["completion_tokens"] == 10
    assert found["choices"][0]["finish_reason"] == "length"


def test_completions_have_16_tokens_and_chats_all_that_fit(served: Served) -> None:
    assert served.complete("t3", max_tokens=None)["usage"]["completion_tokens"] == 16
    reply = served.ask("/v1/chat/completions", chat("t3", max_tokens=None, ignore_eos=True))
    assert reply.json["usage"]["completion_tokens"] == POSITIONS - 1


# Forms


def test_a_stream_says_the_same_in_pieces_with_its_usage(served: Served) -> None:
    body = chat(words(PROMPT), stream=True, n=2, stream_options={"include_usage": True})
    reply = served.ask("/v1/chat/completions", body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last = reply.events
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    assert all(one["usage"] is None and one["object"] == "chat.completion.chunk" for one in events)
    body["stream_options"]["continuous_usage_stats"] = True
    assert [one["usage"]["completion_tokens"] for one in served.ask("/v1/chat/completions", body).events[:-1]][-1] == 16
    for index in (0, 1):
        choices = [one["choices"][0] for one in events if one["choices"][0]["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert [one["finish_reason"] for one in choices] == [None] * 7 + ["length"]
        assert "".join(one["delta"]["content"] for one in choices).split() == words(served.greedy(PROMPT)).split()


def expected_logprobs(served: Served, tokens: list[int]) -> torch.Tensor:
    """Log probabilities of what may follow the prompt and each of the tokens, by eager attention."""
    with torch.no_grad():
        logits = served.eager(torch.tensor([PROMPT + tokens])).logits[0]
    found: torch.Tensor = logits[len(PROMPT) - 1 : -1].log_softmax(-1)
    return found


def test_logprobs_are_those_of_the_eager_model(served: Served) -> None:
    choice = served.complete(PROMPT, logprobs=3, temperature=2.0, seed=1, presence_penalty=1.0)["choices"][0]
    found = choice["logprobs"]
    tokens = [int(word[1:]) for word in found["tokens"]]
    expected = expected_logprobs(served, tokens)
    places = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found["token_logprobs"]), places, rtol=0, atol=1e-4)
    for given, row in zip(found["top_logprobs"], expected, strict=True):
        values, indices = row.topk(3)
        assert list(given) == [f"t{index}" for index in indices.tolist()]
        torch.testing.assert_close(torch.tensor(list(given.values())), values, rtol=0, atol=1e-4)
    assert [choice["text"][at:].split()[0] for at in found["text_offset"]] == found["tokens"]


def test_a_chat_has_logprobs_of_its_own_form(served: Served) -> None:
    reply = served.ask("/v1/chat/completions", chat(words(PROMPT), logprobs=True, top_logprobs=2))
    content = reply.json["choices"][0]["logprobs"]["content"]
    tokens = [int(one["token"][1:]) for one in content]
    assert tokens == served.greedy(PROMPT)
    expected = expected_logprobs(served, tokens).max(-1).values
    torch.testing.assert_close(torch.tensor([one["logprob"] for one in content]), expected, rtol=0, atol=1e-4)
    assert [one["top_logprobs"][0]["token"] for one in content] == [one["token"] for one in content]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]


def test_characters_of_several_tokens_come_whole(bytewise: Served) -> None:
    tokenizer = bytewise.service._tokenizer
    snow = tokenizer("☃")["input_ids"]
    assert len(snow) == 3
    body = {"prompt": "a", "max_tokens": 4, "stream": True, "temperature": 5.0, "seed": 0}
    for seed in range(4):
        body["seed"] = seed
        streamed = bytewise.ask("/v1/completions", body).events
        whole = bytewise.ask("/v1/completions", {**body, "stream": False}).json
        assert "".join(one["choices"][0]["text"] for one in streamed) == whole["choices"][0]["text"]


def test_an_answer_follows_a_json_schema(bytewise: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"color": {"enum": ["red", "blue"]}, "count": {"type": "integer", "minimum": 1, "maximum": 20}},
        "required": ["color", "count"],
        "additionalProperties": False,
    }
    spaces = {str(token): -100 for token in bytewise.service._tokenizer(" \n\t\r")["input_ids"]}
    for seed in range(3):
        found = bytewise.complete(
            "ab", max_tokens=100, temperature=1.0, seed=seed, logit_bias=spaces,
            response_format={"type": "json_schema", "json_schema": {"name": "one", "schema": schema}},
        )["choices"][0]  # fmt: skip
        value = json.loads(found["text"])
        assert value["color"] in ("red", "blue")
        assert 1 <= value["count"] <= 20
        assert found["finish_reason"] == "stop"
    found = bytewise.complete("ab", max_tokens=3, response_format={"type": "json_object"})
    assert found["choices"][0]["text"].lstrip()[:1] == "{"


def test_the_openai_client_is_served_and_told_the_reason(served: Served) -> None:
    async def ask() -> tuple[Any, list[str], str]:
        transport = httpx2.ASGITransport(_Guard(served.service.app(), KEY))
        http = openai.DefaultAsyncHttpx2Client(transport=transport)
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key=KEY, http_client=http) as client:
            messages: Any = [{"role": "user", "content": words(PROMPT)}]
            whole = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8)
            stream = await client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, stream=True)
            pieces = [each.choices[0].delta.content or "" async for each in stream]
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="tiny", messages=messages, temperature=-1)
            with pytest.raises(openai.NotFoundError, match=r"embeddings"):
                await client.embeddings.create(model="tiny", input="t3")
            return whole, pieces, str(caught.value)

    whole, pieces, error = asyncio.run(ask())
    assert whole.choices[0].message.content.split() == words(served.greedy(PROMPT)).split()
    assert "".join(pieces) == whole.choices[0].message.content
    assert "temperature: input should be greater than or equal to 0, got -1" in error
