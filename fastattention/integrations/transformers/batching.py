"""Continuous batching of Transformers on fast_attention: pages are read where they lie, on CPUs and GPUs.

    from fastattention.integrations.transformers import batching

    batching.enable()
    model.set_attn_implementation("fast_attention")
    model.generate_batch(prompts)

`enable` wraps three functions of Transformers and exchanges two entries of a table, `disable` puts them back. Models
with other implementations are batched as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import cache as paged_cache
from transformers.generation.continuous_batching import continuous_api, initialization

from fastattention.integrations.transformers.attention import fast_attention_forward
from fastattention.integrations.transformers.mask_function import fast_attention_mask
from fastattention.integrations.transformers.page_allocators import FullPages, SlidingPages
from fastattention.integrations.transformers.versions import NAME
from fastattention.interface import fast_attn_varlen_func, fast_attn_with_kvcache

# What a model is set to while it is batched. Names with "flash" get no memory for masks that nobody makes, and CUDA
# graphs; without a 2 or 3 behind it nobody looks for a kernel of that name.
BATCHED_NAME = "fast_flash_attention"


class _Replaced:
    """What `enable` has put something else in place of."""

    switch: Callable[..., None] | None = None
    check_decode_path: Callable[..., None]
    update: Callable[..., tuple[Tensor, Tensor]]
    allocators: dict[str, Any]


def enable(switch: bool = False) -> None:
    """Lets models with attn_implementation="fast_attention" be batched. Calling it again changes `switch` only.

    switch: models of "sdpa" and "eager" are batched with fast_attention too, as Transformers does with flash-attn where
        that is installed, unless their configuration says auto_switch_to_flash=False
    """
    disable()
    manager = continuous_api.ContinuousBatchingManager
    _Replaced.switch = switch_before = manager.switch_to_cb_friendly_attn
    _Replaced.check_decode_path = check_before = initialization.ensure_decode_fast_path_is_available
    _Replaced.update = update_before = paged_cache.PagedAttentionCache.update
    _Replaced.allocators = dict(paged_cache.ATTN_TYPE_TO_ALLOCATOR)

    def switch_to_cb_friendly_attn(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        name = model.config._attn_implementation
        if name == NAME or (switch and auto_switch_to_flash and name in ("sdpa", "eager")):
            model.config._attn_implementation = BATCHED_NAME
            self._original_attn_impl = name  # stop() sets it again
        elif name != BATCHED_NAME:
            switch_before(self, model, auto_switch_to_flash)

    def ensure_decode_fast_path_is_available(config: Any, cb_config: Any, user_requested: bool) -> None:
        if config._attn_implementation != BATCHED_NAME:
            check_before(config, cb_config, user_requested)

    @torch.compiler.disable  # as what it replaces
    def update(self: Any, key: Tensor, value: Tensor, layer_idx: int, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        allocator = self.layer_to_allocator[layer_idx]
        if not isinstance(allocator, FullPages):
            return update_before(self, key, value, layer_idx, kwargs)
        allocator.prepare(layer_idx, key, value, kwargs)
        return key, value

    manager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
    initialization.ensure_decode_fast_path_is_available = ensure_decode_fast_path_is_available
    paged_cache.PagedAttentionCache.update = update
    for ours in (FullPages, SlidingPages):
        theirs = _Replaced.allocators[ours.layer_type]
        paged_cache.ATTN_TYPE_TO_ALLOCATOR[ours.layer_type] = _Allocator(ours, theirs)
    AttentionInterface.register(BATCHED_NAME, batched_attention_forward)
    AttentionMaskInterface.register(BATCHED_NAME, fast_attention_mask)


def disable() -> None:
    """Undoes `enable`. Models that are being batched are to be stopped first."""
    if _Replaced.switch is None:
        return
    continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn = _Replaced.switch
    initialization.ensure_decode_fast_path_is_available = _Replaced.check_decode_path
    paged_cache.PagedAttentionCache.update = _Replaced.update
    paged_cache.ATTN_TYPE_TO_ALLOCATOR.update(_Replaced.allocators)
    _Replaced.switch = None


class _Allocator:
    """Stands for the class of an allocator: which it is depends on how the model computes attention."""

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
    kwargs: what `FullPages.prepare` left there. Without it, as while a manager is paused, this is
        `fast_attention_forward`.
    Returns (out, None): out is (1, total_q, nheads, headdim).
    """
    cache = kwargs.pop("cache", None)
    if isinstance(cache, paged_cache.PagedAttentionCache):  # Transformers 5.23 leaves it to this function
        cache.update(key, value, module.layer_idx, kwargs)  # type: ignore[arg-type]
    if "k_cache" not in kwargs:
        return fast_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, softcap=softcap,
            s_aux=s_aux, cache=cache, **kwargs,
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
    if kwargs["cache_seqlens"] is not None:
        q, k, v = q[:, None], k[:, None], v[:, None]
        out: Tensor = fast_attn_with_kvcache(
            q, kwargs["k_cache"], kwargs["v_cache"], k, v, cache_seqlens=kwargs["cache_seqlens"], **options
        )
        return out.transpose(0, 1), None
    if kwargs["block_table"] is not None:
        k, v = kwargs["k_cache"], kwargs["v_cache"]
    lengths = (kwargs[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
    out = fast_attn_varlen_func(q, k, v, *lengths, **options)
    return out[None], None
