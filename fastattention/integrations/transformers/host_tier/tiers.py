"""Tiers: which requests of a batch have pages on the GPU and which in host memory, and how they move.

The GPU's batch admits requests as before. What it has no room for, and what outgrows it, goes to the host lane with the
pages that it has. Where the batch has room again, it asks for the oldest request of the lane that fits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from fastattention.integrations.transformers.host_tier.lane import (
    HostLane,
    count_blocks_that_moved,
    host_batch,
    let_wait,
)
from fastattention.integrations.transformers.page_allocators import allocators_of

# Tokens that a request needs room for to come back, beside those that it has: at most as many as it may still get.
_GROWTH = 1024


def attach(
    batch: Any,
    model: Any,
    generation_config: Any,
    cpu_memory: int,
    compute: Callable[[Any], Any],
    on_change: Callable[[Any], None],
    logit_processor: Any = None,
) -> Tiers:
    """Gives a batch of the GPU a tier of `cpu_memory` bytes in host memory. The others are as of `HostLane`.

    logit_processor: None takes that of the batch
    """
    host = host_batch(batch, model, generation_config, cpu_memory, logit_processor or batch.logit_processor)
    return Tiers(batch, HostLane(host, compute, on_change))


class Tiers(OffloadingManager):
    """Takes the place of the manager that would move requests to host memory to wait there."""

    def __init__(self, batch: Any, lane: HostLane) -> None:
        """Hooks into the batch of the GPU, whose loop calls everything here."""
        self.cache, self.scheduler, self._batch, self.lane = batch.cache, batch.scheduler, batch, lane
        self._in_flight = batch.use_async_batching  # a batch is prepared before the tokens of the last one are known
        self._stream = batch.inputs_and_outputs.compute_stream
        batch.offloading_manager = self
        batch.prepare_next_batch = self._around(batch.prepare_next_batch)
        batch.has_pending_requests = lambda: self.scheduler.has_pending_requests() or lane.has_requests()
        batch.fail_all_requests = self._ending(batch.fail_all_requests)
        batch.scheduler.set_request_cancellation = self._cancelling(batch.scheduler.set_request_cancellation)

    def _around(self, original: Callable[[], bool]) -> Callable[[], bool]:
        @functools.wraps(original)
        def prepare_next_batch() -> bool:
            if self._batch.background_thread_status.is_pause_requested():
                with self.lane.paused:
                    return original()
            self._take_returned()
            self._send_what_never_fits()
            if not self.scheduler.active_requests:  # none is left whose end would lift it
                self.scheduler.block_new_requests = False
            busy = original()
            self._send_waiting()
            self._ask_back()
            return busy

        return prepare_next_batch

    def _ending(self, original: Callable[[Exception], None]) -> Callable[[Exception], None]:
        @functools.wraps(original)
        def fail_all_requests(error: Exception) -> None:
            self.lane.end()
            self._take_returned()
            original(error)
            self.lane.batch.fail_all_requests(error)

        return fail_all_requests

    def _cancelling(self, original: Callable[[str], None]) -> Callable[[str], None]:
        @functools.wraps(original)
        def set_request_cancellation(request_id: str) -> None:
            with self.lane.lock:
                self._take_returned()
                if self.lane.holds(request_id):
                    self.lane.batch.scheduler.set_request_cancellation(request_id)
            original(request_id)

        return set_request_cancellation

    # Between the tiers

    def _take_returned(self) -> None:
        with self.lane.lock:
            while self.lane.returned:
                state = self.lane.returned.popleft()
                for name, allocator in allocators_of(self.cache).items():
                    allocator.take_over(allocators_of(self.lane.batch.cache)[name], state.request_id)
                self.scheduler.add_waiting_request(state)

    def _send_what_never_fits(self) -> None:
        for state in list(self.scheduler.waiting_requests.values()):
            if not state.is_cpu_offloaded and not self._fits(len(state.initial_tokens) + _most_new(state)):
                self._send(state)

    def _most_pages(self, tokens: int) -> dict[str, int]:
        step = self.cache.max_batch_tokens
        return {name: one.most_pages(tokens, step) for name, one in allocators_of(self.cache).items()}

    def _fits(self, tokens: int) -> bool:
        """Whether the GPU's cache holds a request of so many tokens when it is alone."""
        allocators, pages = allocators_of(self.cache), self._most_pages(tokens)
        sectors = sum(-(-pages[name] // one.blocks_per_sector) for name, one in allocators.items())
        return sectors <= self.cache.num_sectors

    def _send_waiting(self) -> None:
        """Sends requests on whose pages the batch would wait. Those that wait for their turn in a step stay."""
        scheduler = self.scheduler
        for state in list(scheduler.waiting_requests.values()):
            count = len(state.remaining_prefill_tokens)
            if scheduler.block_new_requests or not self.cache.can_store_request_tokens(state, count, dry_run=True):
                self._send(state)

    def _send(self, state: RequestState) -> None:
        """Moves a waiting request, unless it is cancelled. If it came back, its pages are still in host memory."""
        if state.request_id in self.scheduler._requests_to_cancel:
            return
        self.scheduler.waiting_requests.pop(state.request_id)
        self.scheduler.waiting_requests_order.remove(state.request_id)
        if state.is_cpu_offloaded:
            self._hand_over(state)
        self.lane.add(state)

    def _hand_over(self, state: RequestState) -> None:
        for name, allocator in allocators_of(self.lane.batch.cache).items():
            allocator.take_over(allocators_of(self.cache)[name], state.request_id)

    def _ask_back(self) -> None:
        """Asks for requests that fit, the oldest first, while none waits for the GPU."""
        scheduler, lane = self.scheduler, self.lane
        if scheduler.block_new_requests or scheduler.starved_requests or scheduler.waiting_requests:
            return
        with lane.lock:
            if lane.wanted or lane.returned or not lane.batch.scheduler.active_requests:
                return
            self.cache.evict_cached_blocks()
            self.cache.pool.try_to_free_sectors()
            needs: list[dict[str, int]] = []
            for state in lane.batch.scheduler.active_requests.values():
                tokens = state.current_len() + min(_most_new(state) or _GROWTH, _GROWTH)
                if not self._fits(tokens):
                    continue
                needs.append(self._most_pages(tokens))
                if self.cache.count_storable_requests(needs) < len(needs):
                    break
                lane.wanted.add(state.request_id)

    # What the batch calls

    def offload_requests(self) -> bool:
        """Moves starved requests, newest first, until the others can be stored. Returns whether anything changed."""
        scheduler, cache = self.scheduler, self.cache
        changed: bool = cache.evict_cached_blocks()
        if not scheduler.starved_requests and not changed:
            waiting = len(scheduler.waiting_requests)
            self._send_waiting()
            return len(scheduler.waiting_requests) < waiting
        starved = scheduler.starved_requests
        needs = [
            {name: one.needs_new_blocks(state.request_id, state.current_len(), count)
             for name, one in allocators_of(cache).items()}
            for state, count in starved
        ]  # fmt: skip
        while starved and cache.count_storable_requests(needs) < len(starved):
            state, _ = starved.pop()
            needs.pop()
            if not self._move_down(state):
                if len(scheduler.active_requests) > 1:
                    self._restart(state)
                else:
                    self._fail(state)
            changed = True
        scheduler.block_new_requests = bool(scheduler.active_requests)
        return changed

    def _move_down(self, state: RequestState) -> bool:
        """Moves a request with its pages. Returns False where host memory has no room for them."""
        name, lane = state.request_id, self.lane
        with lane.lock:
            if not _reserve(lane.batch.cache, self.cache, name):
                return False
            with stream_context(self._stream):
                _copy_blocks(self.cache, lane.batch.cache, name)
            self._hand_over(state)
        self.cache.free_blocks(name, no_cache=True)
        self.scheduler.finish_request(name)
        let_wait(state)
        if self._in_flight:  # the batch under way still looks at its state, so it passes through the next preparation
            with lane.lock:
                lane.returned.append(state)
        else:
            lane.add(state)
        return True

    def _restart(self, state: RequestState) -> None:
        """Begins a request anew, because no memory is left for its pages."""
        self.cache.free_blocks(state.request_id, no_cache=True)
        anew = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED
        self.scheduler.finish_request(state.request_id)
        self.scheduler.add_waiting_request(anew)

    def _fail(self, state: RequestState) -> None:
        """Ends a request for which there is no memory, though no other one holds any on the GPU."""
        error = MemoryError(
            f"a request of {state.current_len()} tokens fits neither cache: {self.cache.max_tokens_read} on the GPU, "
            f"{self.lane.batch.cache.max_tokens_read} in host memory"
        )
        self._batch._handle_request_error(error, state)
        self.scheduler.finish_request(state.request_id)

    def restore_scheduled_requests(self, requests_in_batch: list[FutureRequestState]) -> None:
        """Copies the pages of requests that came back, and frees them in host memory."""
        host = self.lane.batch.cache
        for one in requests_in_batch:
            if not one.state.is_cpu_offloaded:
                continue
            name = one.state.request_id
            with self.lane.lock:
                with stream_context(self._stream):
                    _copy_blocks(host, self.cache, name)
                host.free_blocks(name, no_cache=True)
            one.state.is_cpu_offloaded = False
            count_blocks_that_moved(self.cache, one)

    def free_request_cpu_cache(self, state: RequestState) -> None:
        """Frees pages in host memory of a request that was cancelled while it waited for the GPU."""
        if state.is_cpu_offloaded:
            with self.lane.lock:
                self._hand_over(state)
                self.lane.batch.cache.free_blocks(state.request_id)
            state.is_cpu_offloaded = False

    def free_all_waiting_cpu_caches(self) -> None:
        """The same for all that wait."""
        for state in self.scheduler.waiting_requests.values():
            self.free_request_cpu_cache(state)

    def reset(self) -> None:
        """Forgets all requests, on both sides."""
        self.lane.end()
        self._take_returned()
        self.free_all_waiting_cpu_caches()
        self.lane.batch.reset()
        self.lane.start()


def _most_new(state: RequestState) -> int:
    """Tokens that a request may still get; 0 where it has no limit."""
    return 0 if state.max_new_tokens is None else state.max_new_tokens - len(state.generated_tokens)


def _reserve(to: Any, source: Any, request_id: str) -> bool:
    """Takes as many blocks in a cache as a request has in another."""
    counts = {name: len(one.block_table.get(request_id, ())) for name, one in allocators_of(source).items()}
    if to.count_storable_requests([counts]) == 0:
        to.evict_cached_blocks()
        to.pool.try_to_free_sectors()
        if to.count_storable_requests([counts]) == 0:
            return False
    for name, allocator in allocators_of(to).items():
        missing = max(counts[name] - to.pool.count_free_blocks(allocator.index), 0)
        for _ in range(-(-missing // allocator.blocks_per_sector)):
            to.pool.allocate_sector(allocator.index)
        allocator.block_table[request_id] = to.pool.get_free_blocks(allocator.index, counts[name])
    return True


def _copy_blocks(source: Any, to: Any, request_id: str) -> None:
    """Copies the pages of a request. The k-th block there is that of the k-th here."""
    for name, allocator in allocators_of(source).items():
        here, there = allocator.block_table.get(request_id, []), allocators_of(to)[name].block_table[request_id]
        count = min(len(here), len(there))  # room for new tokens may be there already
        rows = torch.tensor(here[:count], dtype=torch.int64, device="cpu").to(allocator._copy_view.device)
        moved = allocator._copy_view.index_select(0, rows)
        target = allocators_of(to)[name]._copy_view
        at = torch.tensor(there[:count], dtype=torch.int64, device="cpu").to(target.device)
        target.index_copy_(0, at, moved.to(target.device))
