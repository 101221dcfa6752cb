"""HostLane: requests whose pages are in host memory, computed in a thread of their own beside the GPU's batch."""

from __future__ import annotations

import collections
import contextlib
import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus

from fastattention.errors import ArgumentError
from fastattention.integrations.transformers.page_allocators import allocators_of

_log = logging.getLogger(__name__)
_IDLE = 0.05  # seconds between two looks for work


def blocks_in(name: str, memory: int, model: Any, page_size: int) -> int:
    """Blocks that so many bytes hold: pages of every layer. Raises ArgumentError, with the name, for less than two."""
    text = model.config.get_text_config()
    headdim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    nheads_k = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    block = 2 * nheads_k * headdim * text.num_hidden_layers * model.dtype.itemsize * page_size
    if memory < 2 * block:
        raise ArgumentError(f"{name}={memory} bytes hold less than two blocks of {block} bytes")
    return int(memory // block)


def host_batch(batch: Any, model: Any, generation_config: Any, cpu_memory: int, logit_processor: Any) -> Any:
    """A batch like `batch` with a cache of `cpu_memory` bytes in host memory. Its forward pass is the model's own.

    Raises ArgumentError for memory that holds less than two blocks, or that the system does not have.
    """
    config = copy.copy(batch.cb_config)
    config.num_blocks = blocks_in("cpu_memory", cpu_memory, model, config.page_size)
    config.max_memory_percent = 1e9  # Transformers would compare with the memory of the GPU
    config.max_batch_tokens = min(batch.cache.max_batch_tokens, config.num_blocks * config.page_size)
    config.use_cuda_graph = False
    config.use_async_batching = False
    config.cpu_offload_space = 0.0
    config.varlen_compile_config = config.decode_compile_config = None
    if batch.cache.max_blocks_per_request:
        positions = getattr(batch.config, "max_position_embeddings", None) or config.num_blocks * config.page_size
        config.max_blocks_per_request = min(config.num_blocks, -(-positions // config.page_size))
    try:
        cache = paged_cache.PagedAttentionCache(
            config=batch.config, continuous_batching_config=config, device=torch.device("cpu"),
            distributed_helper=batch.distributed_helper, dtype=model.dtype, model_supports_logits_to_keep=True,
        )  # fmt: skip
    except RuntimeError as error:
        raise ArgumentError(f"cpu_memory={cpu_memory} bytes could not be had: {error}") from error
    for allocator in allocators_of(cache).values():
        allocator.in_host_memory = True
    made = continuous_api.ContinuousBatchProcessor(
        cache=cache, config=batch.config, generation_config=generation_config, continuous_batching_config=config,
        logit_processor=logit_processor, input_queue=None, cancel_queue=None, output_router=batch.output_router,
        background_thread_status=continuous_api.BackgroundThreadStatus(), model_device=batch.model_device,
        model_dtype=batch.model_dtype, distributed_helper=batch.distributed_helper,
        scheduler=type(batch.scheduler)(cache, batch.scheduler.safety_margin, batch.scheduler.max_requests_per_batch),
    )  # fmt: skip
    made.offloading_manager = _Arrivals(
        cache, made.scheduler, 0.0, config.cpu_offload_space_safety_threshold, made.inputs_and_outputs.compute_stream,
        batch.distributed_helper,
    )  # fmt: skip
    made.offloading_manager.batch = made
    return made


class PagesAwayError(Exception):
    """No request can be computed until one that is on its way back has freed its pages, or returned."""


class _Arrivals(OffloadingManager):
    """Requests that come from the GPU with pages here are `is_cpu_offloaded` until their first step."""

    batch: Any

    def offload_requests(self) -> bool:
        """Begins requests anew where others can go on then. A request for which all memory is too little fails.

        Raises PagesAwayError where pages are held by requests that are on their way back.
        """
        if super().offload_requests():
            return True
        scheduler = self.scheduler
        active, waiting = scheduler.active_requests, scheduler.waiting_requests
        with_pages = [one for one in waiting.values() if one.is_cpu_offloaded]
        if with_pages and len(with_pages) + len(active) > 1:
            self._restart(with_pages[-1])
        elif any(name not in active and name not in waiting for name in _holders(self.cache)):
            raise PagesAwayError
        else:
            starved = scheduler.starved_requests
            self._fail(starved[0][0] if starved else next(iter(waiting.values())))
        return True

    def _restart(self, state: RequestState) -> None:
        self.cache.free_blocks(state.request_id, no_cache=True)
        self._leave(state)
        self.scheduler.add_waiting_request(state.create_equivalent_initial_request())

    def _fail(self, state: RequestState) -> None:
        tokens = len(state.initial_tokens) + len(state.generated_tokens)
        error = MemoryError(
            f"a request of {tokens} tokens does not fit cpu_memory, which holds {self.cache.max_tokens_read} in all"
        )
        self.batch._handle_request_error(error, state)
        self._leave(state)
        self.scheduler.finish_request(state.request_id)

    def _leave(self, state: RequestState) -> None:
        if self.scheduler.waiting_requests.pop(state.request_id, None) is not None:
            self.scheduler.waiting_requests_order.remove(state.request_id)

    def restore_scheduled_requests(self, requests_in_batch: list[FutureRequestState]) -> None:
        for one in requests_in_batch:
            if one.state.is_cpu_offloaded:
                one.state.is_cpu_offloaded = False
                count_blocks_that_moved(self.cache, one)

    def free_request_cpu_cache(self, state: RequestState) -> None:
        """Frees the pages of a request that has not been computed here."""
        if state.is_cpu_offloaded:
            self.cache.free_blocks(state.request_id)
            state.is_cpu_offloaded = False

    def free_all_waiting_cpu_caches(self) -> None:
        """The same for all such requests."""
        for state in self.scheduler.waiting_requests.values():
            self.free_request_cpu_cache(state)


def let_wait(state: RequestState) -> None:
    """Lets a request with pages in host memory wait for a batch, in the form in which Transformers restores it.

    Its newest token is computed next. One that a batch under way computes is dropped, as it is not known yet.
    """
    if state.status == RequestStatus.DECODING:
        if state.position_offset == len(state.initial_tokens) + len(state.generated_tokens):
            state.position_offset -= 1
            state.remaining_prefill_tokens = [(state.generated_tokens or state.initial_tokens)[-1]]
        else:
            state.remaining_prefill_tokens = state.tokens_to_process[:]
    state._status = RequestStatus.PENDING  # the setter would begin another lifespan
    state.allocated_blocks, state.is_cpu_offloaded = 0, True


def count_blocks_that_moved(cache: Any, one: FutureRequestState) -> None:
    """Lets a request share blocks that came from another cache, as if it had filled them in its next step.

    More than there are would let it share a block of its prompt that is not full yet.
    """
    if cache.use_prefix_sharing:
        for name, allocator in allocators_of(cache).items():
            full = allocator.block_table[one.state.request_id][: one.state.position_offset // allocator.tokens_per_page]
            moved = sum(block not in allocator.ledger.block_to_hash for block in full)
            one.complete_blocks[name] = one.complete_blocks.get(name, 0) + moved


def _holders(cache: Any) -> set[str]:
    """The requests that hold pages."""
    return {name for allocator in allocators_of(cache).values() for name in allocator.block_table}


class HostLane:
    """Steps of a batch in host memory. `lock` guards its requests and pages; it is not held while a step computes."""

    def __init__(self, batch: Any, compute: Callable[[Any], Any], on_change: Callable[[Any], None]) -> None:
        """Both are called in the lane's thread.

        compute: runs the forward pass of a prepared batch, up to its new tokens
        on_change: called with what `compute` returned, or with None where requests were given back or failed
        """
        self.batch, self.lock = batch, threading.RLock()
        self.returned: collections.deque[RequestState] = collections.deque()
        self.wanted: set[str] = set()  # requests that the other side has room for
        self._compute, self._on_change = compute, on_change
        self._wake, self._ended = threading.Event(), threading.Event()
        self._computing = threading.Lock()
        self._thread: threading.Thread | None = None
        self._inference = False

    def start(self) -> None:
        """Starts the thread, unless it runs. It computes in the caller's inference mode."""
        if self._thread is None:
            self._inference = torch.is_inference_mode_enabled()
            self._ended.clear()
            self._thread = threading.Thread(target=self._run, name="host-lane", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Ends the thread after the step under way."""
        thread, self._thread = self._thread, None
        self._ended.set()
        self._wake.set()
        if thread is not None:
            thread.join()

    def add(self, state: RequestState) -> None:
        """Takes a request that is not being computed."""
        with self.lock:
            self.batch.scheduler.add_waiting_request(state)
        self._wake.set()

    def holds(self, request_id: str) -> bool:
        """Whether a request is here."""
        scheduler = self.batch.scheduler
        return request_id in scheduler.active_requests or request_id in scheduler.waiting_requests

    @property
    def paused(self) -> Any:
        """A context in which no step is computed."""
        return self._computing

    def has_requests(self) -> bool:
        """Whether a request is here, or on its way back."""
        with self.lock:
            return bool(self.returned) or self.batch.scheduler.has_pending_requests()

    def _run(self) -> None:
        device = self.batch.model_device
        with torch.inference_mode(self._inference), torch.no_grad():
            if device.type == "cuda":
                torch.cuda.set_device(device)  # of this thread
            while not self._ended.is_set():
                try:
                    busy = self._step()
                except Exception as error:
                    _log.error("a step in host memory failed", exc_info=error)
                    with self.lock:
                        self.batch.fail_all_requests(error)
                    busy = True
                    self._on_change(None)
                if not busy:
                    self._wake.wait(_IDLE)
                    self._wake.clear()

    def _step(self) -> bool:
        """Computes the next tokens of the requests here. Returns whether there was anything to do."""
        with self._computing:
            with self.lock:
                given = self._give_back()
                if not self.batch.scheduler.active_requests:  # none is left whose end would lift it
                    self.batch.scheduler.block_new_requests = False
                busy = False
                with contextlib.suppress(PagesAwayError):
                    busy = self.batch.prepare_next_batch()
            found = self._compute(self.batch) if busy else None
            with self.lock:
                if busy:
                    self.batch.update_batch()
        if busy or given:
            self._on_change(found)
        return bool(busy or given)

    def _give_back(self) -> bool:
        """Hands over the requests that are wanted, with the tokens to be computed next. They keep their pages here."""
        scheduler = self.batch.scheduler
        # Pages of a request that is cancelled are freed in the next step, here.
        wanted, self.wanted = self.wanted - scheduler._requests_to_cancel, set()
        found = [one for name in wanted if (one := scheduler.active_requests.pop(name, None)) is not None]
        for state in found:
            let_wait(state)
            self.returned.append(state)
        return bool(found)
