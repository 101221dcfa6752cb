"""How requests are generated: all in one batch, each with its own sampling.

Transformers' server takes the first request's temperature, top_p and top_k for all, ignores stop strings and penalties,
and dies of a prompt that its cache cannot hold. Here each request has its own, and others are refused.
"""

from __future__ import annotations

import asyncio
import bisect
import copy
import math
from typing import Any

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import CBGenerateManager
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingTopKLogitsWarper,
    ContinuousBatchingTopPLogitsWarper,
)

GREEDY = 1e-30  # a temperature that leaves nothing but the largest score, and 1 / GREEDY times a score finite
# What a request may ask for; Transformers sets use_cache itself.
ALLOWED = frozenset({"max_new_tokens", "temperature", "top_p", "top_k", "do_sample", "use_cache", "eos_token_id"})


class BatchedRequests(CBGenerateManager):
    """Generation of one model's requests: what the handlers of Transformers' server ask for text."""

    def __init__(self, model: Any, config: ContinuousBatchingConfig) -> None:
        """Starts the batch. Raises what Transformers raises for a cache that does not fit memory."""
        super().__init__(config)
        self._defaults = model.generation_config
        vocab_size = model.config.get_text_config().vocab_size
        config.per_request_processors = True
        manager = model.init_continuous_batching(_sampling(self._defaults), config)
        _skip_what_is_off(manager.logit_processor.logits_processor, vocab_size)
        manager.warmup()
        manager.start()
        self._cb = manager
        self._vocab_size = vocab_size
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        capacity = longest_request(manager.batch_processor.cache)
        self.longest: int = capacity if positions is None else min(capacity, positions)  # tokens of prompt and answer
        self.description = (
            f"{model.device}, {str(model.dtype).removeprefix('torch.')}, keys and values of "
            f"{manager.batch_processor.cache.max_tokens_read} tokens, at most {self.longest} a request"
        )

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Nothing: the batch was started before the first request."""

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: GenerationConfig,
        request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue[Any], Any]:
        """As Transformers', with this request's own sampling. Raises HTTPException (400) for what cannot be served."""
        one = self._request(inputs, gen_config)
        return CBGenerateManager.generate_streaming(
            one, model, processor, inputs, gen_config, request_id, response_parser
        )

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """Likewise; 503 for a request that ends with the server."""
        one = self._request(inputs, gen_config)
        try:
            return await CBGenerateManager.generate_non_streaming(one, model, processor, inputs, gen_config, request_id)
        except RuntimeError as error:
            raise HTTPException(503, f"the server ended the request: {error}") from error

    def fail_all(self) -> None:
        """Tells all requests under way that they end here."""
        assert self._cb is not None
        self._cb.stop(block=True, timeout=10, hard_stop=True)

    def _request(self, inputs: Any, gen_config: GenerationConfig) -> CBGenerateManager:
        """A manager for one request, whose length and sampling are checked; its answer is shortened to the room."""
        refuse_unknown(gen_config, self._defaults)
        given = len(inputs["input_ids"])
        room = self.longest - given
        if not 1 <= given < self.longest:
            raise HTTPException(400, f"the prompt has {given} tokens; it must have 1 to {self.longest - 1}")
        if gen_config.max_new_tokens < 1:
            raise HTTPException(400, f"max_tokens={gen_config.max_new_tokens} must be at least 1")
        gen_config.max_new_tokens = min(gen_config.max_new_tokens, room)
        one = CBGenerateManager(self._cb_config)
        one._cb = _Manager(self._cb, sampling_of(gen_config, self._vocab_size))  # type: ignore[assignment]
        return one


class _Manager:
    """A manager that adds a request with sampling of its own."""

    def __init__(self, manager: Any, sampling: dict[str, float | int]) -> None:
        self._manager, self._sampling = manager, sampling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def add_request(self, *args: Any, **kwargs: Any) -> str:
        """The request's id. Raises HTTPException (503) where no requests are taken any more."""
        request_id: str | None = self._manager.add_request(*args, **kwargs, **self._sampling)
        if request_id is None:
            raise HTTPException(503, "the server is stopping")
        return request_id


def sampling_of(gen_config: GenerationConfig, vocab_size: int) -> dict[str, float | int]:
    """temperature, top_p and top_k of a request, with values that turn off what it does not ask for.

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
    if not gen_config.do_sample or temperature == 0.0:
        return {"temperature": GREEDY, "top_p": 1.0, "top_k": vocab_size}
    return {"temperature": temperature, "top_p": top_p, "top_k": min(top_k, vocab_size)}


def refuse_unknown(gen_config: GenerationConfig, defaults: GenerationConfig) -> None:
    """Raises HTTPException (400) where a request asks for more than sampling, which a batch would ignore."""
    usual = [one.to_dict() for one in (defaults, GenerationConfig())]  # type: ignore[no-untyped-call]
    given = {name: value for name, value in gen_config.to_dict().items() if not name.startswith("_")}
    changed = {name for name, value in given.items() if all(value != one.get(name) for one in usual)} - ALLOWED
    if changed:
        names = {"repetition_penalty": "frequency_penalty", "stop_strings": "stop"}
        listed = ", ".join(sorted(names.get(name, name) for name in changed))
        raise HTTPException(400, f"batched requests cannot have {listed}; leave it out")


def longest_request(cache: Any) -> int:
    """Tokens of the longest request that a paged cache holds alone."""

    def sectors(tokens: int) -> int:
        allocators = cache.cache_allocators.values()
        return sum(math.ceil(math.ceil(tokens / one.tokens_per_page) / one.blocks_per_sector) for one in allocators)

    return bisect.bisect_right(range(cache.max_tokens_read + 1), cache.num_sectors, key=sectors) - 1


def _sampling(defaults: GenerationConfig) -> GenerationConfig:
    """What makes Transformers set up temperature, top_k and top_p, which every request then gives."""
    config: GenerationConfig = copy.deepcopy(defaults)
    config.do_sample, config.temperature, config.top_k, config.top_p = True, 0.5, 50, 0.5
    if config.eos_token_id is None:
        config.eos_token_id = -1
    return config


def _skip_what_is_off(processors: list[Any], vocab_size: int) -> None:
    """Sorting all scores takes longer than the rest of a step on CPUs: only requests that need it pay for it."""
    for index, processor in enumerate(processors):
        if isinstance(processor, ContinuousBatchingTopKLogitsWarper):
            processors[index] = _WhereNeeded(processor, vocab_size)
        elif isinstance(processor, ContinuousBatchingTopPLogitsWarper):
            processors[index] = _WhereNeeded(
                processor, torch.ones((), dtype=torch.float32, device="cpu").view(torch.int32)
            )


class _WhereNeeded(ContinuousBatchingLogitsProcessor):
    """One of Transformers' processors, on the rows of a CPU's batch whose argument is not `off`."""

    def __init__(self, processor: Any, off: Any) -> None:
        self._processor, self._off = processor, int(off)
        self.supported_kwargs, self.ignored_kwargs = processor.supported_kwargs, processor.ignored_kwargs

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        self._processor.fill_defaults(int32_tensor)

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        found: Tensor = self._processor.prepare_tensor_args(requests_with_new_token)
        return found

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Scores (tokens, vocab_size), by the arguments of each, int32 (tokens or more,)."""
        if not scores.is_cpu:  # rows cannot be chosen in a CUDA graph
            return self._processor(scores, tensor_arg)  # type: ignore[no-any-return]
        needed = (tensor_arg[: scores.shape[0]] != self._off).nonzero().flatten()
        if needed.numel() == 0:
            return scores
        return scores.index_copy(0, needed, self._processor(scores[needed], tensor_arg[needed]))
