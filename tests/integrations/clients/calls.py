"""What each client asks of the server. A call fails where the answer is not what was asked for."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

MODEL = "tiny"
HI: Any = [{"role": "user", "content": "Hi"}]
FREE: Any = {"temperature": 2.0, "max_tokens": 400}  # enough for a random model to come to an end
ONE_CALL: Any = {"tool_choice": "required", "parallel_tool_calls": False}


class City(BaseModel):
    """The city that is asked for."""

    model_config = ConfigDict(extra="forbid")  # a random model would make up other fields

    city: Literal["Rome", "Oslo"]


TOOL: Any = {"type": "function", "function": {"name": "City", "parameters": City.model_json_schema()}}


class Server(NamedTuple):
    url: str  # without a path
    folder: Path  # of the model

    @property
    def base(self) -> str:
        return f"{self.url}/v1"


Calls = dict[str, Callable[[], object]]  # by feature


def curl(server: Server) -> Calls:
    def ask(path: str, **body: Any) -> str:
        command = ["curl", "-sSN", "--fail-with-body", server.base + path]
        if body:
            command += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def ends(text: str, end: str) -> None:
        assert text.endswith(end), text

    chat = {"messages": HI, "max_tokens": 8}
    return {
        "models": lambda: json.loads(ask("/models"))["data"][0]["id"],
        "chat": lambda: json.loads(ask("/chat/completions", **chat))["choices"][0]["message"]["content"],
        "chat stream": lambda: ends(ask("/chat/completions", **chat, stream=True), "data: [DONE]\n\n"),
        "completion": lambda: json.loads(ask("/completions", prompt="Hi", echo=True))["choices"][0]["text"],
        "response": lambda: json.loads(ask("/responses", input="Hi", max_output_tokens=8))["output"][0]["content"],
    }


def openai(server: Server) -> Calls:
    from openai import OpenAI
    from openai.lib.streaming.chat import ChunkEvent

    client = OpenAI(base_url=server.base, api_key="none", max_retries=0)
    chats = client.chat.completions

    def tools() -> str:
        named: Any = {"type": "function", "function": {"name": "City"}}
        [choice] = chats.create(model=MODEL, messages=HI, tools=[TOOL], tool_choice=named, **FREE).choices
        return called(choice.message.tool_calls)

    def streamed_tools() -> str:
        with chats.stream(model=MODEL, messages=HI, tools=[TOOL], **ONE_CALL, **FREE) as stream:
            assert any(isinstance(event, ChunkEvent) for event in stream)
            return called(stream.get_final_completion().choices[0].message.tool_calls)

    def called(calls: Any) -> str:
        return City.model_validate_json(calls[0].function.arguments).city

    def responses() -> str:
        kinds = []
        for event in client.responses.create(model=MODEL, input="Hi", max_output_tokens=8, stream=True):
            kinds.append(event.type)
        assert kinds[-1] == "response.incomplete", kinds
        return str(kinds)

    def logprobs() -> float:
        [choice] = chats.create(model=MODEL, messages=HI, max_tokens=2, logprobs=True, top_logprobs=3).choices
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        return choice.logprobs.content[0].top_logprobs[2].logprob

    return {
        "models": lambda: client.models.list().data[0].id,
        "chat": lambda: chats.create(model=MODEL, messages=HI, max_completion_tokens=8, n=2).choices[1].message.content,
        "chat stream": lambda: "".join(
            one.choices[0].delta.content or ""
            for one in chats.create(model=MODEL, messages=HI, max_tokens=8, stream=True, stop=["\n"], seed=1)
        ),
        "tools": tools,
        "tools stream": streamed_tools,
        "JSON schema": lambda: (
            chats.parse(model=MODEL, messages=HI, response_format=City, **FREE).choices[0].message.parsed.city
        ),  # type: ignore[union-attr]
        "logprobs": logprobs,
        "completion": lambda: client.completions.create(model=MODEL, prompt=["Hi", "Ho"], logprobs=2).choices[1].text,
        "completion stream": lambda: "".join(
            one.choices[0].text for one in client.completions.create(model=MODEL, prompt="Hi", stream=True)
        ),
        "response": lambda: (
            client.responses.parse(
                model=MODEL, input="Hi", instructions="Short.", text_format=City, temperature=2.0, max_output_tokens=400
            ).output_parsed.city
        ),  # type: ignore[union-attr]
        "response stream": responses,
    }


def langchain(server: Server) -> Calls:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI, OpenAI

    where: Any = {"base_url": server.base, "api_key": "none", "model": MODEL, "max_retries": 0}
    chat, free = ChatOpenAI(**where, max_tokens=8), ChatOpenAI(**where, **FREE)
    responses = ChatOpenAI(**where, max_tokens=8, use_responses_api=True)
    text = OpenAI(**where, max_tokens=8)

    def tools() -> object:
        first = free.bind_tools([City], tool_choice="City").invoke("Hi")
        [call] = first.tool_calls
        return chat.bind_tools([City]).invoke([HumanMessage("Hi"), first, ToolMessage("Rain", tool_call_id=call["id"])])

    def structured() -> str:
        found = free.with_structured_output(City).invoke("Hi")
        assert isinstance(found, City)
        return found.city

    return {
        "chat": lambda: chat.invoke("Hi").content,
        "chat stream": lambda: "".join(str(one.content) for one in chat.stream("Hi")),
        "tools": tools,
        "JSON schema": structured,
        "logprobs": lambda: chat.bind(logprobs=True).invoke("Hi").response_metadata["logprobs"]["content"][0],
        "completion": lambda: text.invoke("Hi"),
        "completion stream": lambda: "".join(text.stream("Hi")),
        "response": lambda: responses.invoke("Hi").content,
        "response stream": lambda: [one.content for one in responses.stream("Hi")],
    }


def litellm(server: Server) -> Calls:
    import litellm as client

    where: Any = {"model": f"hosted_vllm/{MODEL}", "api_base": server.base, "api_key": "none"}
    openai_form: Any = {**where, "model": f"openai/{MODEL}"}

    def tools() -> str:
        made = client.completion(messages=HI, tools=[TOOL], **ONE_CALL, **FREE, **openai_form)
        return City.model_validate_json(made.choices[0].message.tool_calls[0].function.arguments).city

    def structured() -> str:
        made = client.completion(messages=HI, response_format=City, **FREE, **where)
        return City.model_validate_json(made.choices[0].message.content).city

    return {
        "chat": lambda: client.completion(messages=HI, max_tokens=8, **where).choices[0].message.content,
        "chat stream": lambda: [
            one.choices for one in client.completion(messages=HI, max_tokens=8, stream=True, **openai_form)
        ],
        "tools": tools,
        "JSON schema": structured,
        "completion": lambda: client.text_completion(prompt="Hi", max_tokens=8, **where).choices[0].text,
        "response": lambda: client.responses(input="Hi", max_output_tokens=8, **openai_form).output,
    }


def transformers_chat(server: Server) -> Calls:
    def chat() -> str:
        command = [sys.executable, "-m", "transformers.cli.transformers", "chat", MODEL, server.base]
        options = ["max_new_tokens=8", "do_sample=True", "temperature=0.5"]
        # The answer is cut off. The chat asks whether it is to go on.
        done = subprocess.run([*command, *options], input="Hi\nn\n!exit\n", check=True, capture_output=True, text=True)
        assert f"<{MODEL}>:" in done.stdout, done.stdout
        return done.stdout

    return {"chat stream": chat}


def guidellm(server: Server) -> Calls:
    def bench(path: str) -> None:
        report = server.folder / "report.json"
        command = [
            str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console",
            "--backend", f"kind=openai_http,target={server.url},model={MODEL},request_format=/v1/{path}",
            "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=2",
            "--tokenizer", f"kind=huggingface_auto,model={server.folder}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8", "--output", f"kind=json,path={report}",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        [found] = json.loads(report.read_text())["benchmarks"]
        assert found["metrics"]["request_totals"]["successful"] == 2, found["metrics"]["request_totals"]

    return {
        "chat stream": lambda: bench("chat/completions"),
        "completion stream": lambda: bench("completions"),
        "response stream": lambda: bench("responses"),
    }


def lm_eval(server: Server) -> Calls:
    from lm_eval.api.instance import Instance
    from lm_eval.models.api_models import JsonChatStr
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    where: Any = {"model": MODEL, "tokenizer": str(server.folder), "num_concurrent": 1}
    completions = LocalCompletionsAPI(base_url=f"{server.base}/completions", **where)
    chats = LocalChatCompletion(base_url=f"{server.base}/chat/completions", **where)

    def instances(kind: Any, *arguments: Any) -> list[Instance]:
        return [Instance(kind, {}, arguments, 0)]

    def likelihood() -> None:
        [(value, _)] = completions.loglikelihood(instances("loglikelihood", "Hello", " there"))
        assert -6 * 30 < value < 0, value

    until = {"until": ["\n"], "max_gen_toks": 8}
    message = json.dumps(HI)
    return {
        "prompt logprobs": likelihood,
        "completion": lambda: completions.generate_until(instances("generate_until", "Hi", until)),
        "chat": lambda: chats.generate_until(instances("generate_until", JsonChatStr(message), until)),
    }


# By the distribution that has the client, which tells its version.
CLIENTS: dict[str, Callable[[Server], Calls]] = {
    "curl": curl,
    "openai": openai,
    "langchain-openai": langchain,
    "litellm": litellm,
    "transformers": transformers_chat,
    "guidellm": guidellm,
    "lm_eval": lm_eval,
}


def version(client: str) -> str:
    if client == "curl":
        return subprocess.run(["curl", "--version"], check=True, capture_output=True, text=True).stdout.split()[1]
    return importlib.metadata.version(client)
