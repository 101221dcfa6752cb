"""Generates all requests in one batch, in a thread that owns the model.

Transformers' continuous batching has the paged cache, the scheduler and the forward pass. Its loop samples all requests
alike, so this module has a loop of its own around them: a logits processor keeps the logits of a step, and each request
chooses its token from them (docs/decisions/0072-serve-by-a-loop-of-our-own.md).
"""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.generation.continuous_batching.utils import stream_context

from fastattention.errors import ArgumentError
from fastattention.integrations.transformers import NAME, batching
from fastattention.integrations.transformers.host_tier.lane import HostLane, blocks_in
from fastattention.integrations.transformers.host_tier.tiers import attach
from fastattention.integrations.transformers.serving.echoes import Echo, PromptLogprobs
from fastattention.integrations.transformers.serving.errors import RequestError
from fastattention.integrations.transformers.serving.sampling import Sampling, TokenChooser, TokenLogprob, choose
from fastattention.integrations.transformers.serving.step_budget import StepBudget
from fastattention.integrations.transformers.serving.text import Detokenizer, StopStrings

_log = logging.getLogger("uvicorn.error")

MOST_REQUESTS = 256  # in a step; CUDA graphs are padded to a power of two up to it: more would slow all steps
CPU_STEP = 512  # tokens of a step on a CPU: while a long prompt is read, others wait for a chunk of it


@dataclass
class Piece:
    """What a step adds to an answer."""

    text: str = ""
    logprobs: list[tuple[TokenLogprob, int]] = field(default_factory=list)  # and where its text begins
    tokens: int = 0
    finish_reason: str | None = None  # "stop" or "length"; None: more follows
    error: RequestError | None = None


class Generation:
    """One answer: its prompt, how its tokens are chosen, where it ends, and who hears of it."""

    def __init__(
        self,
        prompt: Sequence[int],
        chooser: TokenChooser,
        detokenizer: Detokenizer,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        echo: Echo | None = None,
        deliver: Callable[[Piece], None],
    ) -> None:
        """max_tokens: 0 gives the echo alone; echo: the first piece; deliver: called in the engine's thread.

        include_stop: the text holds the stop string or token at its end
        """
        self.prompt, self.chooser, self.deliver = prompt, chooser, deliver
        self.cached_tokens: int | None = None  # of the prompt, found in the cache; None before the first step
        self.id = ""  # given by the engine
        self.followers: list[Generation] = []  # answers to the same prompt, which begin once its pages can be shared
        self._detokenizer, self._stop = detokenizer, StopStrings(stop, include_stop)
        self.max_tokens, self._include_stop = max_tokens, include_stop
        self.echo = echo
        self._count, self._characters = 0, 0 if echo is None else len(echo.text)

    def accept(self, token: int, logprob: TokenLogprob | None) -> Piece:
        """Takes the next token. Returns what it adds."""
        grammar = self.chooser.grammar
        if grammar is not None and grammar.error is not None:
            return Piece(error=RequestError(400, f"{grammar.param}: {grammar.error}", grammar.param))
        self._count += 1
        piece = Piece(tokens=1)
        if logprob is not None:
            piece.logprobs.append((logprob, self._characters))
        sampling = self.chooser.sampling
        ended = token in sampling.end_tokens
        if not ended or self._include_stop:
            text = self._detokenizer.push(token)
            self._characters += len(text)
            # A stop string counts from the first token on after min_tokens.
            piece.text, found = self._stop.push(text) if self._count > sampling.min_tokens else (text, False)
            if found:
                piece.finish_reason = "stop"
                return piece
        if ended or (grammar is not None and grammar.complete):
            piece.finish_reason = "stop"
        elif self._count >= self.max_tokens:
            piece.finish_reason = "length"
        if piece.finish_reason is not None:
            text, found = self._stop.push(self._detokenizer.finish())
            piece.text += text if found else text + self._stop.finish()
            piece.finish_reason = "stop" if found else piece.finish_reason
        return piece


class Engine:
    """The batch of one model."""

    def __init__(self, model: Any, tokenizer: Any, kv_memory: int | None = None, cpu_kv_memory: int = 0) -> None:
        """kv_memory: bytes; None is a quarter of the free memory on a CPU, and Transformers' own choice on a GPU.

        cpu_kv_memory: bytes of host memory for requests that the GPU has no room for
        Raises ArgumentError for a model that cannot be batched.
        """
        batching.enable()
        model.set_attn_implementation(NAME)
        self._model = model
        self.device, self.dtype = str(model.device), str(model.dtype).removeprefix("torch.")
        self.vocab_size: int = model.config.get_text_config().vocab_size
        config = ContinuousBatchingConfig(use_async_batching=False, max_requests_per_batch=MOST_REQUESTS)
        _set_memory(config, model, kv_memory)
        self._generations: dict[str, Generation] = {}  # the engine's thread alone uses it
        self._commands: queue.SimpleQueue[tuple[Callable[..., None], Any]] = queue.SimpleQueue()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._numbers = itertools.count()
        self._echoed: collections.deque[tuple[Sequence[Generation], PromptLogprobs]] = collections.deque()
        self.cache_usage = 0.0  # share of the pages that hold keys and values of requests or of prefixes to share
        self._logits = _LogitsKeeper(model, MOST_REQUESTS)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        try:
            self._start_batch(config, tokenizer, cpu_kv_memory)
        except Exception as error:  # Transformers finds out only in a step what it cannot batch
            raise ArgumentError(f"a {type(model).__name__} cannot be batched by Transformers: {error}") from error

    def _start_batch(self, config: ContinuousBatchingConfig, tokenizer: Any, cpu_kv_memory: int) -> None:
        plain = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]
        manager = self._model.init_continuous_batching(plain, config)
        manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([self._logits]))
        with torch.no_grad():
            self._batch = manager._create_batch_processor()
            self._batch._handle_request_error = self._fail
            self._lane = self._host_lane(plain, cpu_kv_memory) if cpu_kv_memory else None
            self._budget = StepBudget(self._batch.max_batch_tokens)
            self._batch.warmup(self._model)
            self._try(Detokenizer(tokenizer, []))
        positions = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self.capacity: int = self._batch.cache.max_tokens_read
        caches = [self._batch.cache, *([] if self._lane is None else [self._lane.batch.cache])]
        longest = max(_longest_request(cache) for cache in caches)
        self.longest: int = longest if positions is None else min(longest, positions)  # of prompt and answer

    def _host_lane(self, plain: GenerationConfig, cpu_kv_memory: int) -> HostLane:
        logits = _LogitsKeeper(self._model, MOST_REQUESTS)
        tiers = attach(
            self._batch, self._model, plain, cpu_kv_memory, functools.partial(self._compute, logits=logits),
            lambda chosen: self._command(self._accept, chosen or []),
            ContinuousBatchingLogitsProcessorList(LogitsProcessorList([logits])),
        )  # fmt: skip
        tiers.lane.batch._handle_request_error = self._fail
        return tiers.lane

    def _try(self, detokenizer: Detokenizer) -> None:
        """Generates a token after a prompt of two."""
        pieces: list[Piece] = []
        chooser = TokenChooser(Sampling(), [])
        self._add([Generation([1, 1], chooser, detokenizer, max_tokens=1, deliver=pieces.append)])
        while not pieces:
            if not self._step():
                raise RuntimeError("the cache holds no prompt of two tokens")
        self._step()

    # Called in any thread

    def start(self) -> None:
        """Starts the thread, and that of requests in host memory."""
        self._thread.start()
        if self._lane is not None:
            self._lane.start()

    def submit(self, generations: Sequence[Generation]) -> None:
        """Generates answers to one prompt, which share its pages."""
        self._command(self._add, generations)

    def cancel(self, generation: Generation) -> None:
        """Ends an answer that nobody waits for. Nothing more is delivered once the engine has taken note."""
        self._command(self._cancel, generation)

    def fail_all(self, error: RequestError) -> None:
        """Ends all answers under way with an error."""
        self._command(self._fail_all, error)

    def stop(self, timeout: float) -> None:
        """Ends the thread after the step under way, which is given `timeout` seconds."""
        self._stopped.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._lane is not None:
            self._lane.end()

    @property
    def alive(self) -> bool:
        """Whether requests are served."""
        return self._thread.is_alive() and not self._stopped.is_set()

    @property
    def waiting(self) -> int:
        """Answers that have not begun."""
        return max(0, len(self._generations) - self.running) + self._commands.qsize()

    @property
    def running(self) -> int:
        """Answers that have begun and hold pages."""
        in_host_memory = 0 if self._lane is None else len(self._lane.batch.scheduler.active_requests)
        return len(self._batch.scheduler.active_requests) + in_host_memory

    def _command(self, function: Callable[..., None], argument: Any) -> None:
        self._commands.put((function, argument))
        self._wake.set()

    # Called in the engine's thread

    @torch.no_grad()
    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                busy = self._step()
            except Exception as error:
                self._recover(error)
                continue
            if not busy:
                self._wake.wait(0.1 if self._generations else None)
                self._wake.clear()
        self._fail_all(RequestError(503, "the server has ended"))

    def _step(self) -> bool:
        """Computes the next tokens of the requests that fit a step. Returns False if there are none."""
        while not self._commands.empty():
            function, argument = self._commands.get()
            function(argument)
        batch = self._batch
        echoed = self._read_echoed()
        started = time.perf_counter()
        active, waiting = (getattr(batch.scheduler, f"{kind}_requests").values() for kind in ("active", "waiting"))
        reading = [len(one.initial_tokens) for one in (*active, *waiting) if one.status != RequestStatus.DECODING]
        answers = len(active) + len(waiting) - len(reading)
        batch.max_batch_tokens = self._budget.tokens(answers, max(reading, default=0))
        busy = batch.prepare_next_batch()
        self.cache_usage = 1.0 - float(batch.cache.compute_free_capacity())
        if not busy:
            return echoed
        chosen = self._compute(batch, self._logits)
        lengths = [one.query_length for one in batch.inputs_and_outputs.requests_in_batch]
        batch.update_batch()
        self._budget.took(answers, sum(lengths) - min(answers, len(lengths)), time.perf_counter() - started)
        self._accept(chosen)
        return True

    def _compute(self, batch: Any, logits: _LogitsKeeper) -> list[_Chosen]:
        """The next tokens of a prepared batch, which are written to it. Also called in the thread of the host lane."""
        inputs, runner = batch.inputs_and_outputs, batch.model_runner
        found = [self._generations.get(one.state.request_id) for one in inputs.requests_in_batch]
        for one, generation in zip(inputs.requests_in_batch, found, strict=True):
            if generation is not None and generation.cached_tokens is None:
                generation.cached_tokens = one.state.position_offset - one.query_length
        runner.compute_batch(self._model, inputs.get_model_kwargs(use_padding=runner.pad_inputs))
        pairs = zip(inputs.requests_in_batch, found, strict=True)
        ready = [generation for one, generation in pairs if one.has_new_token]
        # A request in host memory may have been canceled meanwhile.
        choosers = [TokenChooser(Sampling(), []) if one is None else one.chooser for one in ready]
        with stream_context(inputs.compute_stream):
            tokens, logprobs = choose(logits.kept[: len(ready)], choosers)
            inputs.output_ids[0, : len(ready)] = torch.tensor(tokens, dtype=torch.int32, device="cpu")
        inputs.retrieve_device_outputs()
        rows = zip(ready, tokens, logprobs, strict=True)
        return [_Chosen(one, token, logprob) for one, token, logprob in rows if one is not None]

    def _accept(self, chosen: Sequence[_Chosen]) -> None:
        """Delivers new tokens, and ends the answers that are complete."""
        chosen = [one for one in chosen if one.generation.id in self._generations]
        pieces = [one.generation.accept(one.token, one.logprob) for one in chosen]
        for (generation, *_), piece in zip(chosen, pieces, strict=True):
            self._schedule_followers(generation)
            if piece.finish_reason is not None or piece.error is not None:
                self._cancel(generation)
        self._batch.scheduler.clear_cancelled_requests()
        for (generation, *_), piece in zip(chosen, pieces, strict=True):
            generation.deliver(piece)

    def _fail(self, error: Exception, state: RequestState) -> None:
        """Ends a request that a batch gives up. Called in the thread of either batch."""
        failed = RequestError(500, f"this request failed: {type(error).__name__}: {error}")

        def end(request_id: str) -> None:
            if (generation := self._generations.get(request_id)) is not None:
                self._end(generation, Piece(error=failed))

        self._command(end, state.request_id)

    def _add(self, generations: Sequence[Generation]) -> None:
        for one in generations:
            one.id = str(next(self._numbers))
            self._generations[one.id] = one
        first = generations[0]
        if first.echo is None or first.echo.places is None:
            self._begin(generations, [])
        else:
            logprobs = PromptLogprobs(self._model, first.prompt, first.chooser.sampling.logprobs or 0)
            self._echoed.append((generations, logprobs))

    def _read_echoed(self) -> bool:
        """Reads a chunk of the first prompt whose log probabilities are asked for. Returns False if there is none."""
        while self._echoed and all(one.id not in self._generations for one in self._echoed[0][0]):
            self._echoed.popleft()  # canceled
        if not self._echoed:
            return False
        generations, logprobs = self._echoed[0]
        try:
            if logprobs.read_chunk():
                self._echoed.popleft()
                self._begin(generations, logprobs.found)
        except Exception as error:  # the batch does not depend on it
            _log.error("log probabilities of a prompt failed", exc_info=error)
            failed = RequestError(500, f"log probabilities of the prompt failed: {type(error).__name__}: {error}")
            for one in generations:
                self._end(one, Piece(error=failed))
        return True

    def _begin(self, generations: Sequence[Generation], logprobs: Sequence[TokenLogprob]) -> None:
        generations = [one for one in generations if one.id in self._generations]  # others are canceled
        for one in generations:
            if one.echo is not None:
                piece = Piece(one.echo.text, list(zip(logprobs, one.echo.places or (), strict=True)))
                if one.max_tokens:
                    one.deliver(piece)
                else:
                    piece.finish_reason = "length"
                    self._end(one, piece)
        first = generations[0]
        if not first.max_tokens:
            return
        first.followers = generations[1:]
        self._schedule(first)
        cache = self._batch.cache
        if not cache.use_prefix_sharing or len(first.prompt) <= self._batch.cb_config.page_size:
            self._schedule_followers(first)

    def _schedule(self, generation: Generation) -> None:
        # Ends of answers are decided here, so the batch knows of none.
        self._batch.scheduler.add_waiting_request(
            RequestState(generation.id, list(generation.prompt), max_new_tokens=None, eos_token_id=None)
        )

    def _schedule_followers(self, generation: Generation) -> None:
        for one in generation.followers:
            if one.id in self._generations:  # not canceled
                self._schedule(one)
        generation.followers = []

    def _cancel(self, generation: Generation) -> None:
        if self._generations.pop(generation.id, None) is not None:
            self._batch.scheduler.set_request_cancellation(generation.id)  # its pages are free before the next step
            self._batch.scheduler.block_new_requests = False  # set where pages were short
            self._schedule_followers(generation)

    def _end(self, generation: Generation, piece: Piece) -> None:
        if generation.id in self._generations:
            self._cancel(generation)
            generation.deliver(piece)

    def _fail_all(self, error: RequestError) -> None:
        for generation in list(self._generations.values()):
            self._end(generation, Piece(error=error))

    def _recover(self, error: Exception) -> None:
        """Fails all requests of a step that failed, and goes on with an empty cache."""
        _log.error("a step failed", exc_info=error)
        failed = RequestError(500, f"the step of this request failed: {type(error).__name__}: {error}")
        self._fail_all(failed)
        self._batch.reset()


class _Chosen(NamedTuple):
    """The next token of an answer."""

    generation: Generation
    token: int
    logprob: TokenLogprob | None


class _LogitsKeeper(LogitsProcessor):
    """Copies the logits of a step to where CUDA graphs, which record the copy, find them again."""

    supports_continuous_batching = True

    def __init__(self, model: Any, rows: int) -> None:
        size = model.config.get_text_config().vocab_size
        self.kept = torch.empty(rows, size, dtype=torch.float32, device=model.device)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (requests, vocab_size), unchanged."""
        self.kept[: scores.shape[0]].copy_(scores)
        return scores


def _set_memory(config: ContinuousBatchingConfig, model: Any, kv_memory: int | None) -> None:
    """Sets the number of blocks of the cache by its size in bytes."""
    if kv_memory is None:
        if model.device.type != "cpu":
            return
        kv_memory = psutil.virtual_memory().available // 4
    config.num_blocks = blocks_in("kv_memory", kv_memory, model, config.page_size)
    step = CPU_STEP if model.device.type == "cpu" else 2048
    config.max_batch_tokens = min(step, config.num_blocks * config.page_size)
    config.max_memory_percent = 1.0


def _longest_request(cache: Any) -> int:
    """Tokens of the longest request that a paged cache can hold."""

    def sectors(tokens: int) -> int:
        allocators = cache.cache_allocators.values()
        return sum(math.ceil(math.ceil(tokens / one.tokens_per_page) / one.blocks_per_sector) for one in allocators)

    return bisect.bisect_right(range(cache.max_tokens_read + 1), cache.num_sectors, key=sectors) - 1
