"""Prompts that come back before the answer, and their log probabilities."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from word_model import words

from fastattention.integrations.transformers import NAME
from fastattention.integrations.transformers.serving import echoes
from fastattention.integrations.transformers.serving.echoes import PromptLogprobs
from integrations.asgi import Reply, call
from integrations.models import DECODERS, VOCABULARY, pair
from integrations.serving_models import Served, prompts, serve

PROMPT = prompts()[4]


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    found = serve(folder)
    yield found
    found.service.engine.stop(10)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_echo_of_the_prompt_comes_before_the_answer(served: Served, stream: bool) -> None:
    def texts(**body: Any) -> list[str]:
        reply = served.ask("/v1/completions", {"max_tokens": 3, "echo": True, "stream": stream, **body})
        found: dict[int, str] = {}
        for choice in (one for each in (reply.events if stream else [reply.json]) for one in each["choices"]):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
            reason = choice["finish_reason"]
        assert reason == "length"
        return [found[index] for index in sorted(found)]

    answer = words(served.greedy(PROMPT, 3))
    assert texts(prompt=words(PROMPT)) == [f"{words(PROMPT)} {answer}"]
    assert texts(prompt=[PROMPT, [1, 7]], n=2)[:2] == [f"{words(PROMPT)} {answer}"] * 2
    assert texts(prompt=[[1, 7], PROMPT], max_tokens=0) == ["t7", words(PROMPT)]
    assert texts(prompt=[[1, 7], [1]], max_tokens=0, skip_special_tokens=False) == ["<s> t7", "<s>"]
    assert texts(prompt=[1], max_tokens=0) == [""]


def eager_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log probabilities of what may follow each token but the last."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1)
    return found


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool, max_tokens: int
) -> None:
    monkeypatch.setattr(echoes, "CHUNK", 16)
    body = {"prompt": [PROMPT, [7]], "n": 2, "max_tokens": max_tokens, "logprobs": 2, "echo": True, "stream": stream}
    reply = served.ask("/v1/completions", body)
    choices = [one for each in (reply.events if stream else [reply.json]) for one in each["choices"]]
    for index, prompt in enumerate([PROMPT, PROMPT, [7], [7]]):
        parts = [one for one in choices if one["index"] == index]
        text = "".join(one["text"] for one in parts)
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        tokens, logprobs, top, places = ([each for one in parts for each in one["logprobs"][name]] for name in names)
        answer = served.greedy(prompt, max_tokens) if max_tokens else []
        assert tokens == words(prompt + answer).split() == text.split()
        assert [text[place:].split()[0] for place in places] == tokens
        assert parts[-1]["finish_reason"] == "length"
        assert logprobs[0] is top[0] is None
        if len(tokens) > 1:
            expected = eager_logprobs(served.eager, prompt + answer)
            found = expected.gather(1, torch.tensor(prompt[1:] + answer)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(logprobs[1:]), found, rtol=0, atol=1e-4)
            assert [max(one, key=one.get) for one in top[1:]] == words(expected.argmax(-1).tolist()).split()
            assert {len(one) for one in top[1:]} == {2}


@pytest.mark.parametrize("name", DECODERS)
def test_prompts_in_chunks_are_those_of_every_decoder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echoes, "CHUNK", 16)
    prompt = torch.randint(3, VOCABULARY, (75,), generator=torch.Generator().manual_seed(1)).tolist()
    eager = pair(name).eager
    model = copy.deepcopy(eager)
    model.set_attn_implementation(NAME)
    read = PromptLogprobs(model, prompt, 0)
    with torch.no_grad():
        assert [read.read_chunk() for _ in range(5)] == [False] * 4 + [True]
    expected = eager_logprobs(eager, prompt).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    found = torch.tensor([one.logprob for one in read.found[1:]])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_the_batch_goes_on_while_a_prompt_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echoes, "CHUNK", 1)
    ended: list[str] = []

    async def ask(name: str, **body: Any) -> Reply:
        reply = await call(served.service.app(), "/v1/completions", body)
        ended.append(name)
        return reply

    async def both() -> list[Reply]:
        echo = ask("echo", prompt=[5] * 200, max_tokens=0, echo=True, logprobs=0)
        return list(await asyncio.gather(echo, ask("answer", prompt=PROMPT, max_tokens=8)))

    replies = asyncio.run(both())
    assert ended == ["answer", "echo"]
    assert replies[1].json["choices"][0]["text"].split() == words(served.greedy(PROMPT)).split()


def test_a_client_that_leaves_its_echo_and_one_that_fails_harm_no_other(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.service.engine
    body = {"prompt": [5] * 200, "max_tokens": 4, "echo": True, "logprobs": 0}

    async def leave() -> Reply:
        left = asyncio.Event()
        asked = asyncio.ensure_future(call(served.service.app(), "/v1/completions", body, leave=left))
        while not engine._echoed:
            await asyncio.sleep(0.001)
        left.set()
        reply = await asked
        while engine._echoed:
            await asyncio.sleep(0.001)
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(PromptLogprobs, "read_chunk", lambda _: False)  # it never ends
        assert asyncio.run(leave()).status == 499

    def fail(_: Any) -> bool:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(PromptLogprobs, "read_chunk", fail)
        failed, good = served.ask_all("/v1/completions", [body, {"prompt": PROMPT, "max_tokens": 8}])
    assert (failed.status, "no memory" in failed.error["message"]) == (500, True)
    assert good.json["choices"][0]["text"].split() == words(served.greedy(PROMPT)).split()
    assert served.ask("/v1/completions", body).status == 200
