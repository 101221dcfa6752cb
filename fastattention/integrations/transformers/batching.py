"""Continuous batching of Transformers on fast_attention: pages are read in place, on CPUs and GPUs.

    from fastattention.integrations.transformers import batching

    batching.enable()
    model.set_attn_implementation("fast_attention")
    model.generate_batch(prompts)

`enable` wraps four functions of Transformers and replaces two entries of a table; `disable` restores them. Models
with other implementations are batched as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationConfig
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, initialization

from fastattention.attention.interface import fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.transformers.attention import fast_attention_forward
from fastattention.integrations.transformers.block_sparse import refuse_pattern
from fastattention.integrations.transformers.host_tier.attention import attend_to_host_pages
from fastattention.integrations.transformers.host_tier.lane import blocks_in
from fastattention.integrations.transformers.host_tier.tiers import Tiers, attach
from fastattention.integrations.transformers.mask_function import fast_attention_mask
from fastattention.integrations.transformers.page_allocators import FullPages, SlidingPages
from fastattention.integrations.transformers.versions import NAME

# The implementation of a model while it is batched. For names with "flash" Transformers allocates no masks, and uses
# CUDA graphs. Without a 2 or 3 after "flash" it does not look for a kernel of that name.
BATCHED_NAME = "fast_flash_attention"

_WITH_PATTERN = "continuous batching, whose prompts have variable lengths; call model.generate for each of them"

# Settings of a GenerationConfig that batching does not read, and values that switch them off.
_IGNORED = (
    "stop_strings", "num_beams", "max_time", "min_new_tokens", "min_length", "penalty_alpha",
    "prompt_lookup_num_tokens", "assistant_early_exit", "guidance_scale",
)  # fmt: skip
_OFF = (None, False, 1, 1.0)

_undo: list[Callable[[], None]] = []  # functions that restore Transformers


def enable(switch: bool = False, cpu_memory: int = 0) -> None:
    """Lets models with attn_implementation="fast_attention" be batched. Calling it again changes its arguments.

    switch: models of "sdpa" and "eager" are batched with fast_attention too, as Transformers does with flash-attn where
        that is installed, unless their configuration says auto_switch_to_flash=False
    cpu_memory: bytes of host memory for pages. Requests for which the GPU has none are computed with pages there
        (`host_tier`). 0: as many as ContinuousBatchingConfig.cpu_offload_space says.
    """
    disable()
    manager = continuous_api.ContinuousBatchingManager
    _replace(manager, "__init__", _refusing(cpu_memory))
    _replace(manager, "switch_to_cb_friendly_attn", _switching(switch))
    _replace(initialization, "ensure_decode_fast_path_is_available", _allowing_decode_path)
    _replace(paged_cache.PagedAttentionCache, "update", _preparing)
    _replace(manager, "_create_batch_processor", _with_host_tier(cpu_memory))
    table: dict[str, Any] = paged_cache.ATTN_TYPE_TO_ALLOCATOR
    _undo.append(functools.partial(table.update, dict(table)))
    for ours in (FullPages, SlidingPages):
        table[ours.layer_type] = _Allocator(ours, table[ours.layer_type])
    AttentionInterface.register(BATCHED_NAME, batched_attention_forward)
    AttentionMaskInterface.register(BATCHED_NAME, fast_attention_mask)


def disable() -> None:
    """Undoes `enable`. Stop models that are being batched first."""
    while _undo:
        _undo.pop()()


def _replace(owner: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, wrapped(original))
    _undo.append(functools.partial(setattr, owner, name, original))


def _refusing(cpu_memory: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(
            self: Any, model: Any, generation_config: GenerationConfig, continuous_batching_config: Any, *args: Any,
            **kwargs: Any,
        ) -> None:  # fmt: skip
            if model.config._attn_implementation in (NAME, BATCHED_NAME):
                _refuse_ignored(model, generation_config)
                if cpu_memory:
                    blocks_in("cpu_memory", cpu_memory, model, continuous_batching_config.page_size)
            original(self, model, generation_config, continuous_batching_config, *args, **kwargs)

        return init

    return wrapped


def _refuse_layers(model: Any) -> None:
    """Raises UnsupportedError for models with layers that the paged cache of Transformers does not hold.

    These are linear layers and others with states, and latent attention (DeepSeek), whose keys and values differ in
    head dimension.
    """
    config = model.config.get_text_config()
    batched = (FullPages.layer_type, SlidingPages.layer_type)
    others = dict.fromkeys(kind for kind in getattr(config, "layer_types", None) or () if kind not in batched)
    if others or model._is_stateful:
        raise UnsupportedError(
            f"model_type={model.config.model_type!r} has layers of type {', '.join(others) or 'recurrent'}, and the "
            f"paged cache of Transformers holds {' and '.join(batched)} only; call model.generate for each prompt"
        )
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None:
        raise UnsupportedError(
            f"{type(model).__name__} has latent attention (kv_lora_rank={rank}), whose keys and values the paged cache "
            "of Transformers does not hold; call model.generate for each prompt"
        )


def _refuse_ignored(model: Any, config: GenerationConfig) -> None:
    """Raises UnsupportedError for settings that Transformers' batching ignores, or drops with a warning."""
    ignored = [f"{name}={value}" for name in _IGNORED if (value := getattr(config, name, None)) not in _OFF]
    ignored += [
        type(processor).__name__
        for processor in model._get_logits_processor(config)
        if getattr(processor, "supports_continuous_batching", None) is False
    ]
    if ignored:
        raise UnsupportedError(
            f"continuous batching of Transformers does not follow {', '.join(ignored)}; leave it out, or call "
            "model.generate for each prompt"
        )


def _switching(switch: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def wrapped(original: Callable[..., None]) -> Callable[..., None]:
        def switch_to_cb_friendly_attn(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
            refuse_pattern(_WITH_PATTERN)  # checked here, because batches are computed in a thread of their own
            name = model.config._attn_implementation
            if name == NAME or (switch and auto_switch_to_flash and name in ("sdpa", "eager")):
                _refuse_layers(model)
                model.config._attn_implementation = BATCHED_NAME
                self._original_attn_impl = name  # stop() sets it again
            elif name != BATCHED_NAME:
                original(self, model, auto_switch_to_flash)

        return switch_to_cb_friendly_attn

    return wrapped


def _allowing_decode_path(original: Callable[..., None]) -> Callable[..., None]:
    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation != BATCHED_NAME:
            original(config, cb_config, user_requested)
        elif cb_config.use_cuda_graph is None and torch.cuda.is_available():
            # Graphs are for decode steps only: batches with prompts differ too much for graphs to be reused.
            cb_config.use_cuda_graph = (False, True)

    return ensure_decode_fast_path_is_available


def _preparing(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        allocator = self.layer_to_allocator[layer_idx]
        if not isinstance(allocator, FullPages):
            return original(self, key_states, value_states, layer_idx, kwargs)
        allocator.prepare(layer_idx, key_states, value_states, kwargs)
        return key_states, value_states

    # It has the signature of the function that it replaces.
    disabled: Callable[..., Any] = torch.compiler.disable(update)  # type: ignore[no-untyped-call]
    return disabled


def _with_host_tier(cpu_memory: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create(self: Any) -> Any:
            config = self.continuous_batching_config
            if self.model.config._attn_implementation != BATCHED_NAME:
                return original(self)
            memory = cpu_memory or int((config.cpu_offload_space or 0.0) * 2**30)
            if not memory:
                return original(self)
            config.cpu_offload_space = 0.0  # Transformers would use as much for requests that wait
            batch = original(self)
            try:
                if self.distributed_helper.tp_size > 1:
                    raise UnsupportedError(
                        "pages in host memory are not served with tensor parallelism; leave them out"
                    )
                if not isinstance(batch.offloading_manager, Tiers):
                    attach(
                        batch, self.model, self.generation_config, memory,
                        lambda one: one._generation_step(self.model), lambda _: self._wake_up_loop.set(),
                    )  # fmt: skip
            except (ArgumentError, UnsupportedError):
                self.model.config._attn_implementation = self._original_attn_impl  # as stop() would
                raise
            batch.offloading_manager.lane.start()
            return batch

        return create

    return wrapped


class _Allocator:
    """Replaces the class of an allocator: the actual class depends on how the model computes attention."""

    def __init__(self, ours: type[FullPages], theirs: Any) -> None:
        self._ours, self._theirs = ours, theirs
        self.supports_block_table = theirs.supports_block_table

    def __call__(self, *, config: Any, **kwargs: Any) -> Any:
        return (self._ours if config._attn_implementation == BATCHED_NAME else self._theirs)(config=config, **kwargs)


def batched_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over a paged cache, as Transformers' AttentionInterface asks for it.

    query, key, value: (1, nheads or nheads_k, total_q, headdim): the new tokens of all sequences, one after another
    kwargs: with the entries of `FullPages.prepare`. Without them, as while a manager is paused, this is
    `fast_attention_forward`. Returns (out, None): out is (1, total_q, nheads, headdim).
    """
    cache = kwargs.pop("cache", None)
    if isinstance(cache, paged_cache.PagedAttentionCache):  # in Transformers 5.23 this function has to store the tokens
        cache.update(key, value, module.layer_idx, kwargs)
    if "k_cache" not in kwargs:
        return fast_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, softcap=softcap,
            s_aux=s_aux, **kwargs,
        )  # fmt: skip
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))  # (total_q, heads, headdim)
    options = {
        "softmax_scale": scaling,
        "causal": True,
        "window_size": (-1, -1) if sliding_window is None else (sliding_window - 1, 0),
        "softcap": softcap or 0.0,
        "sinks": s_aux,
        "block_table": kwargs["block_table"],
    }
    if kwargs["in_host_memory"] and kwargs["block_table"] is not None:
        refuse_pattern(_WITH_PATTERN)
        return attend_to_host_pages(q, k, v, kwargs, options)[None], None
    if kwargs["cache_seqlens"] is not None:
        q, k, v = q[:, None], k[:, None], v[:, None]
        out: Tensor = fast_attn_with_kvcache(
            q, kwargs["k_cache"], kwargs["v_cache"], k, v, cache_seqlens=kwargs["cache_seqlens"], **options
        )
        return out.transpose(0, 1), None
    refuse_pattern(_WITH_PATTERN)
    if kwargs["block_table"] is not None:
        k, v = kwargs["k_cache"], kwargs["v_cache"]
    lengths = (kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    out = fast_attn_varlen_func(q, k, v, *lengths, **options)
    return out[None], None
