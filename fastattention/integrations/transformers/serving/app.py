"""The routes: OpenAI's completions and chats, with errors in its form."""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fastattention.integrations.transformers.serving.answers import ChatWriter, CompletionWriter, Writer, event
from fastattention.integrations.transformers.serving.echoes import Echo
from fastattention.integrations.transformers.serving.engine import Engine
from fastattention.integrations.transformers.serving.errors import RequestError
from fastattention.integrations.transformers.serving.exchange import CLIENT_LEFT, Exchange
from fastattention.integrations.transformers.serving.grammar import Grammar, Grammars
from fastattention.integrations.transformers.serving.metrics import Metrics
from fastattention.integrations.transformers.serving.prompts import Prompts
from fastattention.integrations.transformers.serving.protocol import ChatRequest, CompletionRequest, ModelRequest, read
from fastattention.integrations.transformers.serving.responses import ResponseRequest, ResponseWriter
from fastattention.integrations.transformers.serving.sampling import Sampling, TokenChooser
from fastattention.integrations.transformers.serving.text import Detokenizer
from fastattention.integrations.transformers.serving.tools import (
    CallReader,
    find_format,
    grammar_of_calls,
    has_special_marks,
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Limits:
    """What clients may ask for."""

    api_key: str | None = None
    request_bytes: int = 4 << 20
    waiting: int = 256  # answers that have not begun


class Service:
    """One model, and the requests to it."""

    def __init__(
        self, name: str, engine: Engine, tokenizer: Any, limits: Limits, defaults: Any, tool_format: str = "auto"
    ) -> None:
        """name: by which clients call the model; defaults: its GenerationConfig; tool_format: of `find_format`."""
        self.name, self.engine, self._tokenizer = name, engine, tokenizer
        self._limits, self._defaults = limits, defaults
        eos = defaults.eos_token_id if defaults.eos_token_id is not None else tokenizer.eos_token_id
        found: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self._eos = [token for token in found if token < engine.vocab_size]
        self._prompts = Prompts(tokenizer, engine.longest, engine.vocab_size)
        self._grammars = Grammars(tokenizer, engine.vocab_size, self._eos)
        self._tool_format = find_format(tool_format, str(tokenizer.chat_template))
        self._metrics = Metrics(engine)
        self._created = int(time.time())
        # One thread: tokenizers are not made for several at once.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._word = functools.lru_cache(maxsize=65536)(lambda token: str(tokenizer.decode([token])))

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/responses", self._responses, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/load_model", self._load_model, methods=["POST"]),
            Route("/health", self._health),
            Route("/metrics", self._counters),
        ]
        handlers: Any = {
            RequestError: self._refuse,
            HTTPException: _answer_http_error,
            ClientDisconnect: lambda *_: Response(status_code=CLIENT_LEFT),
            RecursionError: lambda *_: _answer_error(RequestError(400, "the request is nested too deeply")),
            Exception: _answer_exception,
        }
        app = Starlette(routes=routes, exception_handlers=handlers)
        return app if self._limits.api_key is None else _Guard(app, self._limits.api_key)

    async def _completions(self, request: Request) -> Response:
        asked = read(CompletionRequest, await self._body(request))
        self._check_model(asked.model)
        self._check_room(len(asked.prompts) * asked.n)
        prompts = [await self._beside(self._prompts.complete, one) for one in asked.prompts]
        writer = CompletionWriter(self.name, self._word, asked.logprobs is not None, asked.stream_options)
        echoes: list[Echo | None] = [None] * len(prompts)
        if asked.echo:
            make = functools.partial(self._prompts.echo, asked.skip_special_tokens, asked.logprobs is not None)
            pairs = zip(asked.prompts, prompts, strict=True)
            echoes = [await self._beside(make, given, tokens) for given, tokens in pairs]
        return await self._respond(request, asked, prompts, writer, echoes)

    async def _chat(self, request: Request) -> Response:
        asked = read(ChatRequest, await self._body(request))
        make = functools.partial(ChatWriter, self.name, self._word, asked.logprobs, asked.stream_options)
        return await self._answer_chat(request, asked, make)

    async def _responses(self, request: Request) -> Response:
        asked = read(ResponseRequest, await self._body(request))
        return await self._answer_chat(request, asked.chat(), functools.partial(ResponseWriter, self.name, asked))

    async def _answer_chat(
        self, request: Request, asked: ChatRequest, make_writer: Callable[[Callable[[], CallReader] | None], Writer]
    ) -> Response:
        """make_writer: takes what makes readers of tool calls, None where they stay text."""
        self._check_model(asked.model)
        self._check_room(asked.n)
        tools = None if asked.tool_choice == "none" else asked.described_tools
        options = asked.chat_template_kwargs or {}
        prompt = await self._beside(self._prompts.chat, asked.messages, tools, options)
        form, reader = self._tool_format, None
        if tools and form is not None:
            names, most = {one["function"]["name"] for one in tools}, asked.most_calls
            reader = functools.partial(CallReader, form, names, most)
            if has_special_marks(form, self._tokenizer):  # or they would have no text
                asked = asked.model_copy(update={"skip_special_tokens": False})
        return await self._respond(request, asked, [prompt], make_writer(reader))

    def _refuse(self, request: Request, error: RequestError) -> Response:
        self._metrics.count(request, error.status)
        return _answer_error(error)

    async def _respond(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: Sequence[list[int]],
        writer: Writer,
        echoes: Sequence[Echo | None] = (None,),
    ) -> Response:
        """Generates the answers, and writes them at once or as they come. echoes: what begins each prompt's answers."""
        exchange = Exchange(self.engine, self._metrics, request)
        grammar = await self._beside(self._grammar, asked)
        for prompt, echo in zip(prompts, echoes, strict=True):
            choosers = [
                TokenChooser(self._sampling(asked, choice), prompt, None if grammar is None else grammar.copy())
                for choice in range(asked.n)
            ]
            room = self.engine.longest - len(prompt)
            exchange.add(
                prompt,
                choosers,
                functools.partial(Detokenizer, self._tokenizer, prompt, asked.skip_special_tokens),
                echo=echo,
                max_tokens=room if asked.wanted_tokens is None else min(asked.wanted_tokens, room),
                stop=asked.stop,
                include_stop=asked.include_stop_str_in_output,
            )
        self._check_room(len(exchange.answers))
        if asked.stream:
            return StreamingResponse(exchange.stream(writer), media_type="text/event-stream")
        return await exchange.whole(writer)

    def _grammar(self, asked: CompletionRequest | ChatRequest) -> Grammar | None:
        """What an answer must follow, if anything. Raises RequestError (400) for what is not served."""
        if isinstance(asked, ChatRequest) and (tools := asked.required_tools):
            if self._tool_format is None:
                message = "tool_choice: how this model writes calls is not known; name it by --tool-format"
                raise RequestError(400, message, "tool_choice")
            lark = grammar_of_calls(self._tool_format, tools, asked.most_calls, self._tokenizer)
            return self._grammars.of_calls(lark)
        schema = asked.answer_schema
        return None if schema is None else self._grammars.of_schema(schema)

    def _sampling(self, asked: CompletionRequest | ChatRequest, choice: int) -> Sampling:
        """The sampling of one choice. The model's own defaults count if it samples by default; others are greedy."""
        given = (asked.temperature, asked.top_p, asked.top_k, asked.min_p)
        defaults = self._defaults
        if defaults.do_sample:
            usual = (defaults.temperature or 1.0, defaults.top_p or 1.0, defaults.top_k or 0, defaults.min_p or 0.0)
        else:
            cuts = (asked.top_p or 1.0) < 1.0 or (asked.top_k or 0) > 0 or (asked.min_p or 0.0) > 0.0
            usual = (1.0 if cuts else 0.0, 1.0, 0, 0.0)
        temperature, top_p, top_k, min_p = (b if a is None else a for a, b in zip(given, usual, strict=True))
        for name, tokens in (("logit_bias", asked.logit_bias), ("stop_token_ids", asked.stop_token_ids)):
            for token in tokens:
                if not 0 <= token < self.engine.vocab_size:
                    allowed = f"0 to {self.engine.vocab_size - 1}"
                    raise RequestError(400, f"{name}: token {token} must be {allowed}", name)
        return Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=max(0, int(top_k)),
            min_p=min_p,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            repetition_penalty=asked.repetition_penalty or defaults.repetition_penalty or 1.0,
            logit_bias=asked.logit_bias,
            seed=None if asked.seed is None else f"{asked.seed}, choice {choice}",
            logprobs=asked.wanted_logprobs,
            end_tokens=(*asked.stop_token_ids, *(() if asked.ignore_eos else self._eos)),
            min_tokens=asked.min_tokens,
        )

    async def _body(self, request: Request) -> bytes:
        """The request's body. Raises RequestError (413) as soon as it is too large."""
        most = self._limits.request_bytes
        error = RequestError(413, f"the request has more than {most} bytes (--max-request-bytes)", code="too_large")
        length = request.headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()):
            raise RequestError(400, f"Content-Length must be a number of bytes, got {length[:80]!r}")
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise RequestError(415, f"Content-Encoding {encoding[:80]!r} is not served; send the body as it is")
        if len(length) > 18 or int(length) > most:
            raise error
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise error
        return bytes(body)

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise RequestError(
                404, f"model {name!r} is not served; this server has {self.name!r}", "model", "model_not_found"
            )

    def _check_room(self, answers: int) -> None:
        most = self._limits.waiting
        if answers > most:
            raise RequestError(400, f"the request asks for {answers} answers; this server takes {most} at once")
        if self.engine.waiting + answers > most:
            raise RequestError(429, f"{self.engine.waiting} answers wait; at most {most} may (--max-waiting)")
        if not self.engine.alive:
            raise RequestError(503, "the server is ending")

    async def _beside(self, function: Callable[..., _T], *args: Any) -> _T:
        """Runs a function that may take long beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, functools.partial(function, *args))

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    async def _load_model(self, request: Request) -> Response:
        """Tells `transformers chat` that the model is there. It asks before it begins, and nothing is loaded."""
        self._check_model(read(ModelRequest, await self._body(request)).model)
        return Response(event({"status": "ready", "cached": True}), media_type="text/event-stream")

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._created,
            "owned_by": "fastattention",
            "max_model_len": self.engine.longest,
        }

    async def _health(self, _: Request) -> Response:
        alive = self.engine.alive
        return JSONResponse({"status": "ok" if alive else "ending"}, 200 if alive else 503)

    async def _counters(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


class _Guard:
    """Lets requests in that have the API key. /health is open to all."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._expected = app, f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "http" and scope["path"] != "/health" and not hmac.compare_digest(given, self._expected):
            message = "give the server's API key as 'Authorization: Bearer KEY'"
            error = RequestError(401, message, code="invalid_api_key")
            await JSONResponse(error.body(), 401)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _answer_error(error: RequestError) -> Response:
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


def _answer_http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.scope['path']}: {error.detail}"
    return JSONResponse(RequestError(error.status_code, message).body(), error.status_code, error.headers)


def _answer_exception(_: Request, error: Exception) -> Response:
    return JSONResponse(RequestError(500, f"the server failed: {type(error).__name__}").body(), 500)
