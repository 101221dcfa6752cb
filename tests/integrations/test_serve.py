"""`fastattention serve`, asked by HTTP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiers import deep, slow
from transformers import AutoModelForCausalLM, TemperatureLogitsWarper
from typer.testing import CliRunner
from word_model import save_word_model, words

from fastattention.cli.main import app
from fastattention.integrations.transformers.serving import requests

VOCABULARY, POSITIONS = 200, 512
Answer = tuple[int, Any]  # HTTP status and JSON


class Server(NamedTuple):
    """A running command, and where it listens."""

    process: subprocess.Popen[str]
    port: int
    model: str

    def post(self, path: str, **body: Any) -> Answer:
        """The answer to a request that is not streamed."""
        with self.stream(path, text=json.dumps(body)) as response:
            text = response.read()
            return response.status, json.loads(text) if text.startswith(b"{") else text

    def complete(self, prompt: list[int], count: int = 8, **body: Any) -> str:
        """The text that continues a prompt."""
        status, found = self.post("/v1/completions", prompt=words(prompt), max_tokens=count, **body)
        assert status == 200, found
        text: str = found["choices"][0]["text"]
        return text

    @contextlib.contextmanager
    def stream(
        self, path: str = "/v1/completions", name: str | None = None, **body: Any
    ) -> Iterator[http.client.HTTPResponse]:
        """The response to a request, unread. name: its X-Request-ID."""
        with contextlib.closing(http.client.HTTPConnection("localhost", self.port, timeout=60)) as connection:
            text = body["text"] if "text" in body else json.dumps({**body, "stream": True})
            headers = {"content-type": "application/json"} | ({} if name is None else {"X-Request-ID": name})
            connection.request("POST", path, text, headers)
            with connection.getresponse() as response:
                yield response


def prompts(count: int = 8) -> list[list[int]]:
    """Prompts of 3 to about 60 tokens."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (3 + 7 * one,), generator=generator).tolist() for one in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights with a tokenizer of words t3, t4, ..."""
    path = tmp_path_factory.mktemp("model")
    save_word_model(
        path, VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=POSITIONS, initializer_range=0.5,
    )  # fmt: skip
    return path


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., Server]]:
    """Starts the command with any options; ended at the latest after the tests."""
    processes = []

    def started(*options: str) -> Server:
        command = [
            sys.executable,
            "-m",
            "fastattention",
            "serve",
            str(folder),
            "--port=0",
            "--kv-memory=4MiB",
            *options,
        ]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        processes.append(process)
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 120)[0]
        line = process.stdout.readline()
        found = re.search(
            r"serving .* at http://localhost:(\d+)/v1: cpu, float32, keys and values of (\d+) tokens", line
        )
        assert found, line
        assert int(found[2]) == 4 * 2**20 // (2 * 2 * 8 * 2 * 4 * 256) * 256
        return Server(process, int(found[1]), str(folder))

    yield started
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    """A server that all tests share."""
    return start()


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The continuations of `prompts` by eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    found = []
    for prompt in prompts():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        found.append(words([token for token in tokens if token != 2]))
    return found


@slow
def test_requests_at_once_get_what_each_asks_for(server: Server, expected: list[str]) -> None:
    """Some requests are greedy, others sample."""
    options = [{"temperature": 0.0}, {"temperature": 2.0}, {"temperature": 0.0, "top_p": 0.9}]
    asked = [(prompt, one) for prompt in prompts() for one in options]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: server.complete(one[0], **one[1]), asked))
    assert found[0::3] == expected
    assert found[2::3] == expected


NOTHING_ASKED = {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "stop": [], "logprobs": None, "user": "me"}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"temperature": 1e-40}, NOTHING_ASKED, {"generation_config": '{"top_p": 1.0}'}],
    ids=str,
)
def test_what_asks_for_nothing_else_is_greedy(server: Server, expected: list[str], options: dict[str, Any]) -> None:
    assert [server.complete(prompt, **options) for prompt in prompts()] == expected


def test_a_temperature_samples_though_the_model_is_greedy_by_default(server: Server, expected: list[str]) -> None:
    found = [server.complete(prompt, temperature=5.0) for prompt in prompts()]
    assert sum(one != other for one, other in zip(found, expected, strict=True)) > 4


def test_of_equal_scores_the_first_is_greedy() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0], [2.0, 4.0, 4.0]])
    temperatures = torch.tensor([requests.GREEDY, 2.0, 7.0]).view(torch.int32)
    processor = requests._Temperature(TemperatureLogitsWarper(0.5))  # type: ignore[arg-type]
    assert torch.equal(processor(scores, temperatures), torch.tensor([[-torch.inf, 3, -torch.inf], [1, 2, 2]]))


def test_clients_may_choose_the_same_name(server: Server, expected: list[str]) -> None:
    def ask(prompt: list[int]) -> str:
        with server.stream(name="same", prompt=words(prompt), max_tokens=8, temperature=0.0) as response:
            lines = response.read().decode().splitlines()
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        return "".join(piece["choices"][0]["text"] for piece in pieces)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, prompts()))
    assert [one.split() for one in found] == [one.split() for one in expected]


def test_a_stream_says_the_same_in_pieces(server: Server, expected: list[str]) -> None:
    with server.stream(prompt=words(prompts()[4]), max_tokens=8, temperature=0.0) as response:
        lines = response.read().decode().splitlines()
    pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(piece["choices"][0]["text"] for piece in pieces).split() == expected[4].split()
    assert len(pieces) > 2
    assert pieces[-1]["usage"]["prompt_tokens"] == len(prompts()[4])


def test_a_chat_is_answered(server: Server, expected: list[str]) -> None:
    messages = [{"role": "user", "content": words(prompts()[2])}]
    status, found = server.post("/v1/chat/completions", messages=messages, max_tokens=8, temperature=0.0)
    assert status == 200
    assert found["choices"][0]["message"]["content"].split() == expected[2].split()


BAD_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": 3}, "prompt must be a string"),
    ({"prompt": ""}, "the prompt has 0 tokens"),
    ({"prompt": words([3] * POSITIONS)}, f"the prompt has {POSITIONS} tokens; it must have 1 to {POSITIONS - 1}"),
    ({"prompt": "t3", "max_tokens": "many"}, "many"),
    ({"prompt": "t3", "max_tokens": 0}, "max_tokens=0 must be at least 1"),
    ({"prompt": "t3", "temperature": -1}, "temperature=-1.0 must be 0 to 100"),
    ({"prompt": "t3", "temperature": "hot"}, "hot"),
    ({"prompt": "t3", "top_p": 0}, "top_p=0.0 must be above 0"),
    ({"prompt": "t3", "stop": ["t4"]}, "cannot have stop"),
    ({"prompt": "t3", "frequency_penalty": 1.0}, "cannot have frequency_penalty"),
    ({"prompt": "t3", "generation_config": '{"num_beams": 4}'}, "cannot have num_beams"),
    ({"prompt": "t3", "n": 3}, "cannot have n;"),
    ({"prompt": "t3", "logprobs": 1}, "cannot have logprobs"),
    ({"prompt": "t3", "presence_penalty": 0.5}, "cannot have presence_penalty"),
    ({"prompt": "t3", "seed": 3}, "cannot have seed"),
    ({"prompt": "t3", "logit_bias": {"t4": 3}}, "logit_bias"),
    ({"prompt": "t3", "generation_config": "{"}, "JSONDecodeError"),
    ({"prompt": "t3", "model": "another"}, "another"),
    ({"prompt": "t3", "unheard_of": 1}, "unheard_of"),
]


@pytest.mark.parametrize(("body", "message"), BAD_REQUESTS, ids=[message for _, message in BAD_REQUESTS])
def test_a_bad_request_is_refused_with_the_reason(
    server: Server, expected: list[str], body: dict[str, Any], message: str
) -> None:
    status, found = server.post("/v1/completions", **body)
    assert status in (400, 422)
    assert message in str(found)
    assert server.complete(prompts()[1], temperature=0.0) == expected[1]


@pytest.mark.parametrize("text", ["{", "[]", "", '{"messages": [{"content": "t3"}]}', '{"messages": 3}'])
def test_a_body_that_makes_no_sense_is_refused(server: Server, text: str) -> None:
    with server.stream("/v1/chat/completions", text=text) as response:
        assert response.status in (400, 422)


def test_an_answer_ends_where_the_room_does(server: Server) -> None:
    prompt = [3, 4] * (POSITIONS // 2 - 5)
    status, found = server.post("/v1/completions", prompt=words(prompt), max_tokens=100, temperature=0.0)
    assert status == 200
    assert found["usage"]["completion_tokens"] <= 10


def test_a_client_that_leaves_is_forgotten(server: Server, expected: list[str]) -> None:
    for _ in range(5):
        with server.stream(prompt=words(prompts()[3]), max_tokens=400, temperature=5.0) as response:
            response.read(10)
    assert server.complete(prompts()[3], temperature=0.0) == expected[3]


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=deep)])
def test_requests_under_way_are_finished_before_it_ends(start: Callable[..., Server], number: signal.Signals) -> None:
    server = start()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "/v1/completions", prompt="t3 t4", max_tokens=300, temperature=0.0)
        time.sleep(0.3)
        server.process.send_signal(number)
        status, found = answer.result()
    assert status == 200, found
    assert server.process.wait(60) == 0


@deep
def test_requests_that_take_too_long_are_told_that_it_ends(start: Callable[..., Server]) -> None:
    server = start("--grace=0")
    with server.stream(prompt="t3 t4", max_tokens=500, temperature=100.0) as response:
        first = response.read(20)
        server.process.terminate()
        text = (first + response.read()).decode()
    assert "error" in text or "finish_reason" in text
    assert server.process.wait(60) == 0


def test_a_port_in_use_is_named(folder: Path) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = f"port={taken.getsockname()[1]}"
        finished = CliRunner().invoke(app, ["serve", str(folder), f"--{port}"])
    assert finished.exit_code == 1
    assert port in finished.output
