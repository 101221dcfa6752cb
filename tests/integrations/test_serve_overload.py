"""Clients that leave, more of them than can be served, and steps that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastattention.integrations.transformers.serving.app import Limits
from integrations.asgi import Reply, call
from integrations.serving_models import Served, prompts, serve

PROMPT = prompts()[4]
WAITING = 8


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A service with pages for two long answers."""
    found = serve(folder, kv_memory=1 << 20, limits=Limits(waiting=WAITING))
    yield found
    found.service.engine.stop(10)


ENDLESS = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0}


async def until_idle(served: Served) -> None:
    """Waits until no request is under way, and all pages are free but those of prefixes to share."""
    engine = served.service.engine
    for _ in range(6000):
        if not engine.running and not engine.waiting and not engine._generations:
            break
        await asyncio.sleep(0.01)
    assert (engine.running, engine.waiting) == (0, 0)
    engine._batch.cache.evict_cached_blocks()
    assert engine._batch.cache.compute_free_capacity() == 1.0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_pages(served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    engine = served.service.engine
    step = engine._step

    def slow_step() -> bool:  # the answers would take seconds
        time.sleep(0.01)
        return step()

    async def leave() -> Reply:
        left = asyncio.Event()
        body = {"prompt": PROMPT, "stream": stream, "n": 3, **ENDLESS}
        asked = asyncio.ensure_future(call(served.service.app(), "/v1/completions", body, leave=left))
        while not engine.running:
            await asyncio.sleep(0.001)
        generations = list(engine._generations.values())
        left.set()
        reply = await asked
        await until_idle(served)
        assert [one._count < 400 for one in generations] == [True] * 3
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_step", slow_step)
        reply = asyncio.run(leave())
    assert reply.status == (200 if stream else 499)
    assert b"[DONE]" not in reply.body
    assert served.tokens(PROMPT) == served.greedy(PROMPT)


def test_a_client_that_leaves_while_it_waits_is_forgotten(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave() -> None:
        monkeypatch.setattr(served.service.engine._batch.scheduler, "block_new_requests", True)
        left = asyncio.Event()
        asked = asyncio.ensure_future(
            call(served.service.app(), "/v1/completions", {"prompt": PROMPT, **ENDLESS}, leave=left)
        )
        while not served.service.engine.waiting:
            await asyncio.sleep(0.001)
        left.set()
        assert (await asked).status == 499
        await until_idle(served)

    asyncio.run(leave())


def test_more_than_may_wait_are_told_to_come_back(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = served.service.engine._batch.scheduler

    async def crowd() -> None:
        app = served.service.app()
        monkeypatch.setattr(scheduler, "block_new_requests", True)
        waiting = [
            asyncio.ensure_future(call(app, "/v1/completions", {"prompt": PROMPT, "max_tokens": 2}))
            for _ in range(WAITING)
        ]
        while served.service.engine.waiting < WAITING:
            await asyncio.sleep(0.001)
        reply = await call(app, "/v1/completions", {"prompt": PROMPT})
        assert (reply.status, reply.headers["retry-after"]) == (429, "1")
        assert reply.error["type"] == "rate_limit_error"
        scheduler.block_new_requests = False
        served.service.engine._wake.set()
        assert [one.status for one in await asyncio.gather(*waiting)] == [200] * WAITING

    asyncio.run(crowd())


def test_requests_that_the_cache_cannot_hold_take_turns(served: Served) -> None:
    bodies = [{"prompt": one + [5] * 200, "max_tokens": 80, "ignore_eos": True} for one in prompts()]
    bodies += [{**body, "temperature": 1.0, "seed": 1, "presence_penalty": 1.0} for body in bodies[:2]]
    alone = [served.ask("/v1/completions", body).json["choices"] for body in bodies]
    together = served.ask_all("/v1/completions", bodies[:WAITING]) + served.ask_all("/v1/completions", bodies[WAITING:])
    assert [one.json["choices"] for one in together] == alone


def test_a_step_that_fails_is_told_and_the_next_is_served(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.service.engine._batch.model_runner, "compute_batch", fail)
        reply = served.ask("/v1/completions", {"prompt": PROMPT})
        assert reply.status == 500
        assert "no memory" in reply.error["message"]
        reply = served.ask("/v1/completions", {"prompt": PROMPT, "stream": True})
        assert b"no memory" in reply.body
        assert b"[DONE]" not in reply.body
    assert served.tokens(PROMPT) == served.greedy(PROMPT)
