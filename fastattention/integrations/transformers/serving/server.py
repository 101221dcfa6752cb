"""Starts the server, says where it listens, and ends it so that every request under way gets an answer."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil  # type: ignore[import-untyped]
import typer
from transformers import ContinuousBatchingConfig
from transformers.cli.serve import Serve

from fastattention.errors import ArgumentError, FastAttentionError
from fastattention.integrations.transformers import NAME, batching
from fastattention.integrations.transformers.serving.requests import BatchedRequests, refuse_ignored

MOST_REQUESTS = 256  # requests at a time; CUDA graphs are padded to a power of two up to it: more would slow all steps


class _Server(Serve):
    """Transformers' server, which does not start until `start` is called."""

    def start_server(self) -> None:
        """Does nothing: `start` does."""

    def start(self) -> threading.Thread:
        """Starts the thread that serves. The main thread waits for signals, which only it may handle."""
        Serve.start_server(self)  # type: ignore[no-untyped-call]
        thread: threading.Thread = self._thread
        return thread


def serve(
    model: str,
    host: str,
    port: int,
    kv_memory: int | None,
    grace_seconds: float,
    options: Sequence[str],
    announce: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Serves until SIGINT or SIGTERM.

    model: folder or name on the hub
    port: 0 takes any that is free
    kv_memory: bytes for keys and values; None is a quarter of the free memory on a CPU, and Transformers' own choice on
        a GPU
    grace_seconds: for requests under way to finish when the server is to end
    options: those of `transformers serve`
    announce: called with the line that says where the server listens
    warn: called with settings that the model loses, and when the server ends

    Raises ArgumentError for a port that is in use, and for a model that cannot be loaded or has inputs besides text.
    """
    if not grace_seconds >= 0:
        raise ArgumentError(f"grace={grace_seconds} must be a number of seconds from 0 on")
    _check_free(host, port)
    server = _load(model, host, port, options)
    requests = _start_batch(server, model, kv_memory, warn)
    _refuse_wrong_values(server.server.config.app)
    for handler in (server._chat_handler, server._completion_handler, server._response_handler):
        refuse_ignored(handler)

    wanted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: wanted.set())
    thread = server.start()
    while not server.server.started and thread.is_alive():
        time.sleep(0.01)
    if not server.server.started:
        requests.fail_all()
        raise ArgumentError(f"the server did not start at host={host!r}, port={port}; its log says why")
    if thread.is_alive():
        port = server.server.servers[0].sockets[0].getsockname()[1]
        announce(f"serving {model} at http://{host}:{port}/v1: {requests.description}")
    while thread.is_alive() and not wanted.wait(0.2):
        pass
    warn(f"ending; requests under way have {grace_seconds:g} seconds")
    _end(server, requests, thread, grace_seconds)


def _check_free(host: str, port: int) -> None:
    """Raises ArgumentError for a port in use. A name may have foreign addresses; one of this machine is enough."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        for index, (family, *_, address) in enumerate(addresses, start=1):
            try:
                socket.create_server(address, family=family).close()
                return
            except OSError as error:
                if index == len(addresses) or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"host={host!r}, port={port} cannot be listened at: {reason}") from error


def _load(model: str, host: str, port: int, options: Sequence[str]) -> _Server:
    """Transformers' server of this model, not started. It parses its own options."""
    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    command = typer.main.get_command(app)
    given = {"continuous_batching": True, "host": host, "port": port, "non_blocking": True}
    context = command.make_context("fastattention serve", [model, *options])
    with context, _failing_as(f"model {model!r} cannot be loaded"):
        return _Server(**context.params | given)


@contextlib.contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Turns any error of Transformers for a damaged or unusual model into an ArgumentError."""
    try:
        yield
    except (FastAttentionError, MemoryError):
        raise
    except Exception as error:
        raise ArgumentError(f"{what}: {error}") from error


def _start_batch(server: _Server, model: str, kv_memory: int | None, warn: Callable[[str], None]) -> BatchedRequests:
    """Starts the batch that the server asks for text, instead of one that it would make at the first request."""
    [timed] = server._model_manager.loaded_models.values()
    loaded, state = timed.model, server._generation_state
    if not state.use_continuous_batching(loaded, server._model_manager.get_model_modality(loaded, timed.processor)):
        raise ArgumentError(f"model {model!r} is a {type(loaded).__name__}; only models of text alone can be served")
    batching.enable()
    loaded.set_attn_implementation(NAME)
    config = state._cb_config or ContinuousBatchingConfig()
    config.max_requests_per_batch = config.max_requests_per_batch or MOST_REQUESTS
    _set_memory(config, loaded, kv_memory)
    with _failing_as(f"model {model!r} cannot be batched"):
        state._cb_manager = requests = BatchedRequests(loaded, config)
    if requests.left_out:
        warn(f"batched requests leave out what the model asks for: {', '.join(requests.left_out)}")
    state._cb_model_id = server._model_manager.process_model_name(model)
    return requests


def _set_memory(config: ContinuousBatchingConfig, model: Any, kv_memory: int | None) -> None:
    """Sets the number of blocks of the cache by its size in bytes."""
    if kv_memory is None:
        if model.device.type != "cpu" or config.num_blocks is not None:
            return
        kv_memory = psutil.virtual_memory().available // 4
    text = model.config.get_text_config()
    headdim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    nheads_k = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    block = 2 * nheads_k * headdim * text.num_hidden_layers * model.dtype.itemsize * config.page_size
    if kv_memory < 2 * block:
        raise ArgumentError(f"kv_memory={kv_memory} bytes hold less than two blocks of {block} bytes")
    config.num_blocks = kv_memory // block
    config.max_batch_tokens = config.max_batch_tokens or min(2048, config.num_blocks * config.page_size)
    config.max_memory_percent = config.max_memory_percent or 1.0


def _refuse_wrong_values(app: Any) -> None:
    """Answers values of a wrong type with 400 and the reason, not 500, because they are the client's errors."""
    from fastapi.responses import JSONResponse
    from jinja2.exceptions import TemplateError

    async def refuse(_: Any, error: Exception) -> JSONResponse:
        logging.getLogger("uvicorn.error").info("refused", exc_info=error)  # otherwise our own bugs would not be logged
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)

    for kind in (ValueError, TypeError, LookupError, AttributeError, OverflowError, TemplateError):
        app.add_exception_handler(kind, refuse)


def _end(server: _Server, requests: BatchedRequests, thread: threading.Thread, grace_seconds: float) -> None:
    """Takes no more requests, lets current ones finish, and ends those that take too long with an error."""
    server.server.should_exit = True
    thread.join(grace_seconds)
    requests.fail_all()
    thread.join(5.0)
    server.server.force_exit = True
    thread.join(5.0)
