"""Generates requests: all in one batch, each with its own sampling.

Transformers' server takes the first request's temperature, top_p and top_k for all, ignores stop strings and penalties,
and crashes on a prompt that its cache cannot hold. Here each request has its own sampling, and unsupported ones are
refused.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBGenerateManager
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTemperatureLogitsWarper,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

GREEDY = 1e-30  # stands for temperature 0: only the largest score, or the first of several, is kept
# Fields that a request may set. Transformers sets use_cache and cache_implementation itself.
ALLOWED = frozenset({"max_new_tokens", "eos_token_id", "temperature", "top_p", "top_k", "do_sample", "use_cache",
                     "cache_implementation"})  # fmt: skip
NAMES = {"repetition_penalty": "frequency_penalty", "stop_strings": "stop", "sequence_bias": "logit_bias"}
# Fields that Transformers' server ignores and that change no answer, and values that have no effect.
HARMLESS = frozenset({"user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls"})
NOTHING: tuple[Any, ...] = (None, 0, "auto", "none", [], {}, {"type": "text"}, ["text"])


class BatchedRequests(CBGenerateManager):
    """Generates one model's requests. The handlers of Transformers' server ask it for text."""

    def __init__(self, model: Any, config: ContinuousBatchingConfig) -> None:
        """Starts the batch. Raises Transformers' error for a cache that does not fit memory."""
        super().__init__(config)
        self._defaults = model.generation_config
        vocab_size = model.config.get_text_config().vocab_size
        self._usual = [one.to_dict() for one in (self._defaults, GenerationConfig())]  # type: ignore[no-untyped-call]
        sampling = _sampling(self._defaults)
        processors = model._get_logits_processor(sampling)
        self.left_out = [
            type(one).__name__ for one in processors if not getattr(one, "supports_continuous_batching", True)
        ]
        config.per_request_processors = True
        manager = model.init_continuous_batching(sampling, config)
        _skip_what_is_off(manager.logit_processor.logits_processor, vocab_size)
        manager.warmup()
        manager.start()
        self._cb = manager
        _try(manager)
        self._vocab_size = vocab_size
        self._count = itertools.count()
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        capacity = longest_request(manager.batch_processor.cache)
        self.longest: int = capacity if positions is None else min(capacity, positions)  # tokens of prompt and answer
        self.description = (
            f"{model.device}, {str(model.dtype).removeprefix('torch.')}, keys and values of "
            f"{manager.batch_processor.cache.max_tokens_read} tokens, at most {self.longest} a request"
        )

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Does nothing: the batch was started before the first request."""

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """Streams as Transformers does, with this request's own sampling. Raises HTTPException (400)."""
        one, request_id = self._request(inputs, gen_config, request_id)
        return CBGenerateManager.generate_streaming(
            one, model, processor, inputs, gen_config, request_id, response_parser
        )

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """The same for a whole answer. Raises HTTPException (503) for a request that ends with the server."""
        one, request_id = self._request(inputs, gen_config, request_id)
        try:
            return await CBGenerateManager.generate_non_streaming(one, model, processor, inputs, gen_config, request_id)
        except RuntimeError as error:
            raise HTTPException(503, f"the server ended the request: {error}") from error

    def fail_all(self) -> None:
        """Ends all requests under way with an error."""
        assert self._cb is not None
        self._cb.stop(block=True, timeout=10, hard_stop=True)

    def _request(self, inputs: Any, gen_config: GenerationConfig, request_id: str) -> tuple[CBGenerateManager, str]:
        """A manager for one request, whose length and sampling are checked, with its id in the batch.

        The answer is shortened to the room. Clients choose request_id, and may choose the same, so the batch has ids of
        its own.
        """
        refuse_unknown(gen_config, self._usual)
        given = len(inputs["input_ids"])
        room = self.longest - given
        if not 1 <= given < self.longest:
            raise HTTPException(400, f"the prompt has {given} tokens; it must have 1 to {self.longest - 1}")
        wanted = room if gen_config.max_new_tokens is None else int(gen_config.max_new_tokens)
        if wanted < 1:
            raise HTTPException(400, f"max_tokens={wanted} must be at least 1")
        gen_config.max_new_tokens = min(wanted, room)
        one = CBGenerateManager(self._cb_config)
        sampling = sampling_of(gen_config, self._defaults, self._vocab_size)
        one._cb = _Manager(self._cb, sampling)  # type: ignore[assignment]
        return one, f"{request_id}#{next(self._count)}"


class _Manager:
    """A manager that adds one request with its own sampling."""

    def __init__(self, manager: Any, sampling: dict[str, float | int]) -> None:
        self._manager, self._sampling = manager, sampling
        self._add: Callable[[], str] | None = None  # adds a streamed request once its output is asked for

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        """The request's id. Raises HTTPException (503) where no more requests are taken."""
        if kwargs["streaming"]:
            self._add = functools.partial(self._add_now, *args, **kwargs)
            request_id: str = kwargs["request_id"]
            return request_id
        return self._add_now(*args, **kwargs)

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Registers the handler of a streamed request. Transformers' server does so after it has added the request."""
        self._manager.register_result_handler(request_id, callback)
        if self._add is not None:
            self._add()

    def _add_now(self, *args: Any, **kwargs: Any) -> str:
        given: str | None = None
        try:
            given = self._manager.add_request(*args, **kwargs, **self._sampling)
        finally:
            if given is None:
                self._forget(kwargs["request_id"])
        if given is None:
            raise HTTPException(503, "the server is stopping")
        return given

    def cancel_request(self, request_id: str) -> None:
        """Cancels the request of a client that has disconnected."""
        self._manager.cancel_request(request_id)
        self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        with self._manager.output_router._lock:
            self._manager.output_router.result_handlers.pop(request_id, None)


def sampling_of(gen_config: GenerationConfig, defaults: GenerationConfig, vocab_size: int) -> dict[str, float | int]:
    """temperature, top_p and top_k of a request, with neutral values for those that it does not ask for.

    A request samples if the model does by default, or if it asks for another value of one of the three.
    Raises HTTPException (400) for values out of range.
    """
    temperature = 1.0 if gen_config.temperature is None else float(gen_config.temperature)
    top_p = 1.0 if gen_config.top_p is None else float(gen_config.top_p)
    top_k = gen_config.top_k or vocab_size
    if not 0.0 <= temperature <= 100.0:
        raise HTTPException(400, f"temperature={temperature} must be 0 to 100")
    if not 0.0 < top_p <= 1.0:
        raise HTTPException(400, f"top_p={top_p} must be above 0 and at most 1")
    if type(top_k) is not int or top_k < 1:
        raise HTTPException(400, f"top_k={gen_config.top_k!r} must be an integer from 0 on; 0 takes all tokens")
    asks = (gen_config.temperature, gen_config.top_p or 1.0, gen_config.top_k or vocab_size) != (
        defaults.temperature, defaults.top_p or 1.0, defaults.top_k or vocab_size
    )  # fmt: skip
    if temperature < 1e-5 or not (gen_config.do_sample or asks):
        return {"temperature": GREEDY, "top_p": 1.0, "top_k": vocab_size}
    return {"temperature": temperature, "top_p": top_p, "top_k": min(top_k, vocab_size)}


def refuse_unknown(gen_config: GenerationConfig, usual: Sequence[dict[str, Any]]) -> None:
    """Raises HTTPException (400) where a request asks for more than sampling: a batch would ignore it.

    usual: configurations whose values are allowed: the model's and Transformers' own
    """
    given = {name: value for name, value in gen_config.to_dict().items() if not name.startswith("_")}
    if given.get("repetition_penalty") == 1.0:  # neutral: Transformers makes it of frequency_penalty=0
        del given["repetition_penalty"]
    changed = [
        name
        for name, value in given.items()
        if name not in ALLOWED and value not in (None, [], {}) and all(value != one.get(name) for one in usual)
    ]
    if changed:
        listed = ", ".join(sorted(NAMES.get(name, name) for name in changed))
        raise HTTPException(400, f"batched requests cannot have {listed}; leave it out")


def refuse_ignored(handler: Any) -> None:
    """Makes a handler of Transformers' server refuse (400) fields that it ignores, and seeds, which affect all."""
    validate = handler._validate_request

    def validate_request(body: dict[str, Any]) -> None:
        validate(body)
        fields = ((handler._unused_fields | {"logit_bias"}) - HARMLESS) & body.keys()
        ignored = sorted(
            name for name in fields if body[name] not in NOTHING and not (name in ("n", "best_of") and body[name] == 1)
        )
        if body.get("seed") is not None:
            ignored.append("seed")
        if ignored:
            raise HTTPException(400, f"batched requests cannot have {', '.join(ignored)}; leave it out")

    handler._validate_request = validate_request


def longest_request(cache: Any) -> int:
    """Tokens of the longest request that a paged cache can hold."""

    def sectors(tokens: int) -> int:
        allocators = cache.cache_allocators.values()
        return sum(math.ceil(math.ceil(tokens / one.tokens_per_page) / one.blocks_per_sector) for one in allocators)

    return bisect.bisect_right(range(cache.max_tokens_read + 1), cache.num_sectors, key=sectors) - 1


def _try(manager: Any) -> None:
    """Generates a token: Transformers refuses models only then. Raises RuntimeError with its reason."""
    manager.add_request([1, 1], request_id="trial", max_new_tokens=1, temperature=GREEDY, top_p=1.0, top_k=1)
    while (result := manager.get_result(timeout=1.0)) is None:
        if not manager.is_running():
            raise RuntimeError(f"{manager.background_thread_status.fatal_error}")
    if result.error is not None:
        manager.stop(block=True, hard_stop=True)
        raise RuntimeError(result.error)


def _sampling(defaults: GenerationConfig) -> GenerationConfig:
    """A configuration that makes Transformers set up temperature, top_k and top_p. Every request then gives its own."""
    config: GenerationConfig = copy.deepcopy(defaults)
    config.do_sample, config.temperature, config.top_k, config.top_p = True, 0.5, 50, 0.5
    if config.eos_token_id is None:
        config.eos_token_id = -1
    return config


def _skip_what_is_off(processors: list[Any], vocab_size: int) -> None:
    """Limits processors to rows that need them: on CPUs sorting all scores takes longer than the rest of a step."""
    for index, processor in enumerate(processors):
        if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
            processors[index] = _WhereNeeded(processor, vocab_size)
        elif isinstance(processor, ContinuousBatchingTemperatureLogitsWarper):
            processors[index] = _Temperature(processor)
        elif isinstance(processor, ContinuousBatchingTopPLogitsWarper):
            processors[index] = _WhereNeeded(
                processor, torch.ones((), dtype=torch.float32, device="cpu").view(torch.int32)
            )


class _Temperature(ContinuousBatchingTemperatureLogitsWarper):
    """Transformers' warper, but GREEDY rows keep only the first of their largest scores, often several in 16 bits."""

    def __init__(self, processor: ContinuousBatchingTemperatureLogitsWarper) -> None:
        self.temperature = processor.temperature

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores (tokens, vocab_size), each row divided by its temperature."""
        temperatures = tensor_arg[: scores.shape[0]].view(torch.float32)[:, None]
        greedy = temperatures < 1e-5
        places = torch.arange(scores.shape[1], device=scores.device)
        others = greedy & (places != scores.argmax(dim=1, keepdim=True))
        return (scores / torch.where(greedy, 1.0, temperatures)).masked_fill(others, -torch.inf)


class _WhereNeeded(ContinuousBatchingLogitsProcessor):
    """One of Transformers' processors, applied on CPUs only to rows whose argument is not `off`."""

    def __init__(self, processor: Any, off: Any) -> None:
        self._processor, self._off = processor, int(off)
        self.supported_kwargs, self.ignored_kwargs = processor.supported_kwargs, processor.ignored_kwargs

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        self._processor.fill_defaults(int32_tensor)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        found: Tensor = self._processor.prepare_tensor_args(requests_with_new_token)
        return found

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Processed scores (tokens, vocab_size); tensor_arg: the arguments of the rows, int32 (tokens or more,)."""
        if not scores.is_cpu:  # rows cannot be chosen in a CUDA graph
            return self._processor(scores, tensor_arg)  # type: ignore[no-any-return]
        needed = (tensor_arg[: scores.shape[0]] != self._off).nonzero().flatten()
        if needed.numel() == 0:
            return scores
        return scores.index_copy(0, needed, self._processor(scores[needed], tensor_arg[needed]))
