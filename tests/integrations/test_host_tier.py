"""Continuous batching with pages in host memory too: the tokens of eager attention, whatever moves where."""

from __future__ import annotations

import collections
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import deep, slow
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from fastattention import ArgumentError
from fastattention.integrations.transformers import batching
from fastattention.integrations.transformers.host_tier.lane import HostLane, count_blocks_that_moved
from fastattention.integrations.transformers.host_tier.tiers import Tiers
from integrations.models import DECODERS, pair
from integrations.test_batching import NEW_TOKENS, OPTIONS, batched_tokens, eager_tokens, eager_tokens_of, requests

HOST_MEMORY = 1 << 26  # holds every request of these tests
names = pytest.mark.parametrize(
    "name",
    ["llama", "mistral", *(pytest.param(name, marks=slow) for name in DECODERS if name not in ("llama", "mistral"))],
)


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    batching.enable(cpu_memory=HOST_MEMORY)
    yield
    batching.disable()
    assert not [one for one in threading.enumerate() if one.name == "host-lane"]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often requests went to host memory, with pages and without, and came back; and steps there."""
    counted: collections.Counter[str] = collections.Counter()

    def count(owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        def wrapped(*args: Any) -> Any:
            result = original(*args)
            counted[name] += result is not False
            return result

        monkeypatch.setattr(owner, method, wrapped)

    count(Tiers, "_move_down", "with pages")
    count(Tiers, "_send", "without pages")
    count(Tiers, "_restart", "restarted")
    count(HostLane, "_give_back", "came back")
    count(HostLane, "_step", "steps")
    return counted


def by_hand(model: Any, act: Callable[[Any], None], num_blocks: int = 16, **options: Any) -> None:
    """Calls `act` with a started manager, and asserts that it left no page taken."""
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0),  # type: ignore[no-untyped-call]
        ContinuousBatchingConfig(num_blocks=num_blocks, **OPTIONS | options),
    )
    manager.start()
    try:
        act(manager)
        batch = manager.batch_processor
        wait_until(lambda: not batch.has_pending_requests())
    finally:
        manager.stop(block=True)
    for cache in (batch.cache, batch.offloading_manager.lane.batch.cache):
        cache.evict_cached_blocks()
        cache.pool.try_to_free_sectors()
        assert cache.compute_free_capacity() == 1.0
        for allocator in cache.cache_allocators.values():
            assert not allocator.block_table
            assert not getattr(allocator, "_begins", None)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def eager_continuation(eager: Any, prompt: list[int], count: int) -> list[int]:
    tokens = eager.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    found: list[int] = tokens[0, len(prompt) :].tolist()
    return found


@names
def test_tokens_are_those_of_eager_attention(name: str, moves: collections.Counter[str]) -> None:
    prompts, expected = eager_tokens_of(name, 12)
    assert batched_tokens(pair(name).fast, prompts, num_blocks=40, max_batch_tokens=256) == expected
    assert moves["steps"] > 0
    assert moves["without pages"] > 0
    assert moves["restarted"] == 0


@pytest.mark.parametrize("in_flight", [False, True], ids=["one-batch", "one-in-flight"])
def test_a_request_that_outgrows_the_gpu_moves_with_its_pages(
    in_flight: bool, moves: collections.Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how long it gets, so it begins on the GPU."""
    eager, fast = pair("llama")
    prompts = requests(4, longest=60)

    def act(manager: Any) -> None:
        wait_until(lambda: manager.batch_processor is not None)
        manager.batch_processor.offloading_manager._in_flight = in_flight
        request = manager.add_request(prompts[0], max_new_tokens=200)
        assert manager.get_result(request, timeout=60).generated_tokens == long
        for prompt, expected in zip(prompts[1:], eager_tokens(eager, prompts[1:]), strict=True):
            assert manager.get_result(manager.add_request(prompt), timeout=60).generated_tokens == expected

    long = eager_continuation(eager, prompts[0], 200)
    monkeypatch.setattr("fastattention.integrations.transformers.host_tier.tiers._most_new", lambda state: 0)
    by_hand(fast, act, num_blocks=8)
    assert moves["with pages"] == 1


def test_a_request_comes_back_when_the_gpu_has_room(moves: collections.Counter[str]) -> None:
    eager, fast = pair("llama")
    prompts = [requests(3, longest=size)[1] for size in (500, 300)]  # half as long
    expected = [eager_continuation(eager, one, count) for one, count in zip(prompts, (40, 150), strict=True)]

    def act(manager: Any) -> None:
        sent = [manager.add_request(one, max_new_tokens=count) for one, count in zip(prompts, (40, 150), strict=True)]
        found = {one.request_id: one.generated_tokens for one in (manager.get_result(timeout=60) for _ in sent)}
        assert [found[one] for one in sent] == expected

    by_hand(fast, act, num_blocks=22, max_batch_tokens=64)
    assert moves["came back"] > 0


def test_a_request_longer_than_the_gpu_s_cache_is_served(moves: collections.Counter[str]) -> None:
    eager, fast = pair("llama")
    prompts = [*requests(5, longest=60), requests(3, longest=900)[1]]
    expected = eager_tokens(eager, prompts)
    assert batched_tokens(fast, prompts, num_blocks=8, max_batch_tokens=128) == expected
    assert moves["with pages"] == 0  # it is known to be too long


def test_a_window_keeps_a_long_request_on_the_gpu(moves: collections.Counter[str]) -> None:
    eager, fast = pair("mistral")
    prompts = [requests(3, longest=900)[1]]
    assert batched_tokens(fast, prompts, num_blocks=16, max_batch_tokens=64) == eager_tokens(eager, prompts)
    assert moves["steps"] == 0


def test_requests_begin_anew_where_host_memory_is_full_too(moves: collections.Counter[str]) -> None:
    prompts, expected = eager_tokens_of("llama", 12)
    fast = pair("llama").fast
    text = fast.config
    block = 2 * text.num_key_value_heads * text.head_dim * text.num_hidden_layers * 4 * OPTIONS["page_size"]
    batching.enable(cpu_memory=40 * block)
    assert batched_tokens(fast, prompts, num_blocks=40, max_batch_tokens=256) == expected


def test_a_request_that_nothing_holds_fails_alone() -> None:
    eager, fast = pair("llama")
    prompts = requests(3, longest=60)
    text = fast.config
    block = 2 * text.num_key_value_heads * text.head_dim * text.num_hidden_layers * 4 * OPTIONS["page_size"]
    batching.enable(cpu_memory=8 * block)

    def act(manager: Any) -> None:
        long = manager.add_request(prompts[0], max_new_tokens=500)
        others = [manager.add_request(prompt) for prompt in prompts[1:]]
        results = {one.request_id: one for one in (manager.get_result(timeout=60) for _ in range(3))}
        assert re.match(r"a request of \d+ tokens does not fit cpu_memory, which holds 128", results[long].error)
        assert [results[one].generated_tokens for one in others] == eager_tokens(eager, prompts[1:])

    by_hand(fast, act, num_blocks=8, max_batch_tokens=64)


def test_a_prompt_has_several_continuations() -> None:
    eager, fast = pair("llama")
    prompts = requests(6, longest=200)
    expected = [one for one in eager_tokens(eager, prompts) for _ in range(3)]
    found = batched_tokens(fast, prompts, num_blocks=20, max_batch_tokens=128, num_return_sequences=3)
    assert sorted(found) == sorted(expected)


def test_the_setting_of_transformers_is_followed(moves: collections.Counter[str]) -> None:
    batching.enable()
    prompts, expected = eager_tokens_of("llama", 12)
    found = batched_tokens(pair("llama").fast, prompts, num_blocks=40, max_batch_tokens=256, cpu_offload_space=0.0625)
    assert found == expected
    assert moves["steps"] > 0


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=deep)])
@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=slow)])
def test_nothing_is_lost_when_a_third_is_cancelled(name: str, count: int) -> None:
    eager, fast = pair(name)
    prompts = requests(40, longest=200)
    expected = eager_tokens(eager, prompts)
    draw = random.Random(count)

    def act(manager: Any) -> None:
        chosen = set(draw.sample(range(count), count // 3))
        endless = set(draw.sample(sorted(chosen), count // 6))  # until they are cancelled
        names = [
            manager.add_request(prompts[index % 40], max_new_tokens=50_000 if index in endless else NEW_TOKENS)
            for index in range(count)
        ]
        sent = {name: index % 40 for index, name in enumerate(names)}
        cancelled = {names[index] for index in chosen}
        for request in sorted(cancelled):
            time.sleep(draw.random() * 0.01)
            manager.cancel_request(request)
        missing = set(sent) - cancelled
        while missing:
            result = manager.get_result(timeout=60)
            assert result.error is None
            assert result.generated_tokens == expected[sent[result.request_id]]
            missing.discard(result.request_id)

    by_hand(fast, act, num_blocks=20, max_batch_tokens=64)


def test_a_pause_stops_both_tiers() -> None:
    _, fast = pair("llama")
    prompts = requests(8, longest=200)

    def act(manager: Any) -> None:
        sent = [manager.add_request(prompt, max_new_tokens=60) for prompt in prompts]
        wait_until(lambda: manager.batch_processor is not None)
        lane = manager.batch_processor.offloading_manager.lane
        wait_until(lambda: bool(lane.batch.scheduler.active_requests))
        with manager.pause():
            assert lane._computing.locked()
        for _ in sent:
            assert manager.get_result(timeout=60).error is None

    by_hand(fast, act, num_blocks=20, max_batch_tokens=64)


def test_a_failed_step_in_host_memory_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, fast = pair("llama")
    prompts = [*requests(3, longest=60), requests(3, longest=900)[1]]

    def failing(*args: Any) -> Any:
        raise RuntimeError("no processor left")

    monkeypatch.setattr(batching, "attend_to_host_pages", failing)

    def act(manager: Any) -> None:
        sent = [manager.add_request(prompt) for prompt in prompts]
        results = {one.request_id: one for one in (manager.get_result(timeout=60) for _ in sent)}
        assert "no processor left" in results[sent[3]].error
        assert [results[one].generated_tokens for one in sent[:3]] == eager_tokens(eager, prompts[:3])

    by_hand(fast, act, num_blocks=20, max_batch_tokens=64)


def test_a_manager_can_be_started_again() -> None:
    prompts, expected = eager_tokens_of("llama", 12)
    fast = pair("llama").fast
    for _ in range(2):
        options = {"num_blocks": 40, "max_batch_tokens": 256, "page_size": 16}
        found = fast.generate_batch(
            prompts,
            generation_config=GenerationConfig(
                max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0, do_sample=False
            ),  # type: ignore[no-untyped-call]
            continuous_batching_config=ContinuousBatchingConfig(**options),
            persistent_manager=True,
        )
        assert [one.generated_tokens for one in found.values()] == expected
    fast.destroy_cached_continuous_batching_manager()


def test_memory_for_less_than_two_blocks_is_refused() -> None:
    batching.enable(cpu_memory=1000)
    with pytest.raises(ArgumentError, match="cpu_memory=1000 bytes hold less than two blocks"):
        batched_tokens(pair("llama").fast, requests(3))


def test_memory_that_the_system_does_not_have_is_named() -> None:
    batching.enable(cpu_memory=1 << 50)
    fast = pair("llama").fast
    with pytest.raises(ArgumentError, match=r"cpu_memory=1125899906842624 bytes could not be had"):
        batched_tokens(fast, requests(3))
    assert fast.config._attn_implementation == "fast_attention"


def test_a_cancelled_request_does_not_come_back() -> None:
    """Its pages are freed in the next step in host memory."""
    active = {name: RequestState(name, [1, 2, 3]) for name in "ab"}
    scheduler = SimpleNamespace(active_requests=dict(active), _requests_to_cancel={"a"})
    lane = HostLane(SimpleNamespace(scheduler=scheduler), lambda _: None, lambda _: None)
    lane.wanted = {"a", "b", "gone"}
    assert lane._give_back()
    assert list(lane.returned) == [active["b"]]
    assert scheduler.active_requests == {"a": active["a"]}
    assert not lane.wanted


def test_only_full_blocks_that_nobody_shares_yet_are_counted() -> None:
    """With more, a block of the prompt would be shared before it is full."""
    state = RequestState("a", list(range(100)), position_offset=40)
    allocator = SimpleNamespace(
        tokens_per_page=16, block_table={"a": [5, 6, 7]}, ledger=SimpleNamespace(block_to_hash={5: 1})
    )
    cache = SimpleNamespace(use_prefix_sharing=True, cache_allocators={"full": allocator})
    one = FutureRequestState(state, True, {"full": 1}, 20)
    count_blocks_that_moved(cache, one)
    assert one.complete_blocks == {"full": 2}
