"""Loads the model, starts the server, and ends it so that every request under way gets an answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import ipaddress
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastattention.errors import ArgumentError, FastAttentionError
from fastattention.integrations.transformers import NAME
from fastattention.integrations.transformers.serving.app import Limits, Service
from fastattention.integrations.transformers.serving.engine import Engine
from fastattention.integrations.transformers.serving.errors import RequestError

_FOLLOWED = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper",
             "RepetitionPenaltyLogitsProcessor")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Where and what to serve."""

    model: str  # a folder, or a name on the hub, with @REVISION
    name: str | None = None  # by which clients call it; None: as `model`
    host: str = "127.0.0.1"
    port: int = 8000  # 0 takes any that is free
    device: str | None = None  # None: a GPU where there is one
    dtype: str = "auto"
    kv_memory: int | None = None  # bytes for keys and values
    cpu_kv_memory: int = 0  # bytes of host memory for those of requests that the GPU has no room for
    grace_seconds: float = 30.0  # for requests under way when the server is to end
    trust_remote_code: bool = False
    tool_format: str = "auto"  # how the model writes tool calls, as in `find_format`
    limits: Limits = field(default_factory=Limits)


def serve(settings: Settings, announce: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM. A second signal ends at once.

    announce: called with the line that says where the server listens
    warn: called with settings that are risky or lost, and when the server ends

    Raises ArgumentError for an address that cannot be listened at, and for a model that cannot be served.
    """
    with contextlib.closing(_listen(settings.host, settings.port)) as listener:
        service = load(settings, warn)
        engine = service.engine
        if settings.limits.api_key is None and not _is_loopback(listener):
            warn(f"host={settings.host!r} can be reached from other machines, and no --api-key is set")
        config = uvicorn.Config(service.app(), log_level="warning", lifespan="off", timeout_keep_alive=30)
        engine.start()
        place = f"http://{_written(settings.host)}:{listener.getsockname()[1]}/v1"
        description = (
            f"{engine.device}, {engine.dtype}, keys and values of {engine.capacity} tokens, at most {engine.longest} a "
            "request"
        )
        line = f"serving {service.name} at {place}: {description}"
        server = _Server(config, engine, settings.grace_seconds, functools.partial(announce, line), warn)
        try:
            server.run([listener])
        finally:
            engine.stop(0.0 if server.force_exit else 5.0)


def load(settings: Settings, warn: Callable[[str], None]) -> Service:
    """The model and its routes. Raises ArgumentError for a model that cannot be served."""
    source, _, revision = settings.model.partition("@")
    options: dict[str, Any] = {"revision": revision or None, "trust_remote_code": settings.trust_remote_code}
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        config = AutoConfig.from_pretrained(source, **options)
        if type(config) not in AutoModelForCausalLM._model_mapping and "auto_map" not in vars(config):
            raise ArgumentError(f"model {settings.model!r} has a {type(config).__name__}; only text models are served")
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=settings.dtype, attn_implementation=NAME, **options
        )
        model.to(torch.device(device)).eval()
    except (FastAttentionError, MemoryError):
        raise
    except Exception as error:  # Transformers raises anything for a damaged or unusual model
        raise ArgumentError(f"model {settings.model!r} cannot be loaded: {error}") from error
    lost = [
        type(one).__name__
        for one in model._get_logits_processor(model.generation_config)
        if type(one).__name__ not in _FOLLOWED
    ]
    if lost:
        warn(f"the server leaves out what the model's generation config asks for: {', '.join(lost)}")
    engine = Engine(model, tokenizer, settings.kv_memory, settings.cpu_kv_memory)
    return Service(
        settings.name or settings.model, engine, tokenizer, settings.limits, model.generation_config,
        settings.tool_format,
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Uvicorn's server, whose end is told to the requests under way."""

    def __init__(
        self, config: uvicorn.Config, engine: Engine, grace_seconds: float, started: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:  # fmt: skip
        super().__init__(config)
        self._engine, self._grace, self._when_started, self._warn = engine, grace_seconds, started, warn

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._when_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more requests, lets current ones finish, and ends those that take too long with an error."""
        self._warn(f"ending; requests under way have {self._grace:g} seconds, a second signal ends at once")
        late = asyncio.get_running_loop().call_later(
            self._grace, self._engine.fail_all, RequestError(503, "the server has ended before the answer")
        )
        cut_off = asyncio.ensure_future(self._cut_off())
        await super().shutdown(sockets)
        late.cancel()
        cut_off.cancel()
        if self.force_exit:  # every request that is cut off would log a traceback
            logging.getLogger("uvicorn.error").disabled = True

    async def _cut_off(self) -> None:
        """Closes all connections at the second signal. From Python 3.12 on uvicorn waits until clients close them."""
        while not self.force_exit:
            await asyncio.sleep(0.1)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends after the requests under way at the first signal, and at once at the second."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles signals while the server runs. The command's exit status is 0, since it has done as it was told."""
        before = {one: signal.signal(one, self.handle_exit) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. A name may have foreign addresses; one of this machine is enough."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for index, (family, *_, address) in enumerate(addresses, start=1):
            try:
                return socket.create_server(address[:2], family=family)
            except OSError as error:
                if index == len(addresses) or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"host={host!r}, port={port} cannot be listened at: {reason}") from error
    raise AssertionError("getaddrinfo gives an address or raises")


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].split("%")[0]).is_loopback


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host
