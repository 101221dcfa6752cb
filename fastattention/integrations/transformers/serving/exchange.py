"""One request under way: what the engine delivers, as one answer or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fastattention.integrations.transformers.serving.answers import Answer, Writer, usage
from fastattention.integrations.transformers.serving.engine import Engine, Generation, Piece
from fastattention.integrations.transformers.serving.errors import RequestError
from fastattention.integrations.transformers.serving.metrics import Metrics
from fastattention.integrations.transformers.serving.sampling import TokenChooser
from fastattention.integrations.transformers.serving.text import Detokenizer

CLIENT_LEFT = 499  # as proxies log it


class Exchange:
    """One request under way: its answers, and whether its client is still there."""

    def __init__(self, engine: Engine, metrics: Metrics, request: Request) -> None:
        self.answers: list[Answer] = []
        self._engine, self._metrics, self._request = engine, metrics, request
        self._groups: list[list[Generation]] = []  # by prompt
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()  # None: the client has left
        self._begun = time.perf_counter()
        self._status = CLIENT_LEFT  # until all answers are complete

    def add(
        self, prompt: list[int], choosers: Sequence[TokenChooser], detokenizer: Callable[[], Detokenizer], **ends: Any
    ) -> None:
        """Adds a prompt and its choices. ends: max_tokens, stop, include_stop and echo of `Generation`."""
        group = []
        for chooser in choosers:
            deliver = functools.partial(self._deliver, len(self.answers))
            group.append(Generation(prompt, chooser, detokenizer(), deliver=deliver, **ends))
            self.answers.append(Answer())
        self._groups.append(group)

    def _deliver(self, index: int, piece: Piece) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(self._pieces.put_nowait, (index, piece))

    async def whole(self, writer: Writer) -> Response:
        """The answer once it is complete. Raises RequestError where it failed."""
        async with contextlib.aclosing(self._received()) as received:
            async for _ in received:
                pass
        self._metrics.count(self._request, self._status)
        if self._status == CLIENT_LEFT:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(writer.whole(self.answers, self._usage()))

    async def stream(self, writer: Writer) -> AsyncIterator[str]:
        """Server-sent events. An error is an event, since the status has been sent."""
        try:
            for text in writer.opening():
                yield text
            async with contextlib.aclosing(self._received()) as received:
                async for index, piece in received:
                    for text in writer.chunk(index, piece, self._usage):
                        yield text
            for text in writer.closing(self.answers, self._usage()):
                yield text
        except RequestError as error:
            self._status = error.status
            yield writer.failure(error)
        finally:
            self._metrics.count(self._request, self._status)

    async def _received(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """Submits all, and gives pieces as they come, until all answers are complete or the client has left.

        Whatever ends it, answers that are not complete are canceled. Raises RequestError where one failed.
        """
        watch = asyncio.ensure_future(self._until_left())
        watch.add_done_callback(lambda _: self._pieces.put_nowait(None))
        try:
            for group in self._groups:
                self._engine.submit(group)
            open_answers = len(self.answers)
            while open_answers and (got := await self._pieces.get()) is not None:
                index, piece = got
                if piece.error is not None:
                    raise piece.error
                if piece.tokens and not any(one.tokens for one in self.answers):
                    self._metrics.first_token.observe(time.perf_counter() - self._begun)
                self.answers[index].add(piece)
                open_answers -= piece.finish_reason is not None
                yield index, piece
            if not open_answers:
                self._status = 200
        finally:
            watch.cancel()
            generations = (one for group in self._groups for one in group)
            for generation, answer in zip(generations, self.answers, strict=True):
                if answer.finish_reason is None:
                    self._engine.cancel(generation)
            self._count_tokens()

    async def _until_left(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass

    def _count_tokens(self) -> None:
        metrics, used = self._metrics, self._usage()
        metrics.prompt_tokens.inc(used["prompt_tokens"])
        metrics.cached_tokens.inc(used["prompt_tokens_details"]["cached_tokens"])
        metrics.tokens.inc(used["completion_tokens"])
        metrics.duration.observe(time.perf_counter() - self._begun)

    def _usage(self) -> dict[str, Any]:
        firsts = [group[0] for group in self._groups]
        cached_tokens = sum(one.cached_tokens or 0 for one in firsts)
        return usage(sum(len(one.prompt) for one in firsts), cached_tokens, self.answers)
