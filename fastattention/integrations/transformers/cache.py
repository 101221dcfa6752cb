"""FastAttentionCache: a cache for Transformers models that stays within a budget of GPU memory."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fastattention.errors import ArgumentError
from fastattention.integrations.transformers.cache_layers import IndexedLayer, StoredLayer, WindowLayer
from fastattention.integrations.transformers.indexers import builds_masks_of_indices
from fastattention.integrations.transformers.latents import joined, serve_latents
from fastattention.integrations.transformers.model_source import import_modeling
from fastattention.integrations.transformers.stored import NewTokens, PaddingOf, StoredTokens
from fastattention.offload.device import Device, cuda_device
from fastattention.offload.hardware import Hardware
from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps, Usage
from fastattention.offload.measure import hardware_around
from fastattention.offload.memory import PAGE_SIZE, OffloadWorkload, prompt_workspace
from fastattention.offload.model_shape import ModelShape
from fastattention.offload.pages import PageShape
from fastattention.offload.policy import Policy, read_policy
from fastattention.offload.prediction import (
    Predict,
    seconds_per_token,
    seconds_per_token_in_halves,
    upload_fraction,
)
from fastattention.quantized import LARGEST_STORED
from fastattention.sizes import read_bytes

HOST_SHARE = 0.8  # default share of the memory that is free on the host


class Half(NamedTuple):
    """The share of a cache that holds one half of a batch in the budgets of the whole batch."""

    caps: MemoryCaps
    batch_size: int  # sequences of the whole batch


class FastAttentionCache(Cache):
    """Keys and values of a model within a budget of GPU memory; layers that do not fit are kept by the CPU.

        cache = FastAttentionCache(model.config, gpu_memory="16GiB")
        model.generate(**inputs, cache=cache)  # past_key_values=cache before Transformers 5.24

    - `config`: that of the model, which must be loaded with attn_implementation="fast_attention"
    - `gpu_memory`: all that this process may take of the GPU, weights included: a number of bytes, or "16GiB". The
      cache gets what remains after `workspace` and what torch has allocated when the first tokens come.
    - `kv_budget`: instead of gpu_memory, the GPU memory that keys and values may take
    - `cpu_memory`: the host memory that they may take; by default four fifths of what is free
    - `policy`: how layers in host memory are attended to. "classical" uploads them for every token, "cooperative" lets
        the CPU attend to them, "hybrid" does each for a part. "auto" takes the policy that is predicted fastest.
      Where an indexer selects keys (DeepSeek-V3.2), the GPU gathers these over the link, whatever the policy.
    - `cpu_cache_dtype`: torch.int8 or torch.float8_e4m3fn keeps host memory quantized: half the bytes, not exact
    - `workspace`: GPU memory for activations. Default: about what 8192 tokens of a prompt take, as with
      prefill_chunk_size=8192.
    - `hardware`: bandwidths for the prediction, a `fastattention.offload.hardware.Hardware`; measured by default
    - `page_size`: tokens of a sequence that are stored and moved together
    - `device`: a `fastattention.offload.device.Device`; by default the device of the first keys

    Layers with a sliding window keep only their window, on the GPU, as in a DynamicCache. All sequences of a batch have
    the same length, with padding on the left. Raises ArgumentError for budgets and configurations that make no sense.
    Raises CacheFullError when a budget is used up, before any token is lost.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        gpu_memory: int | str | None = None,
        *,
        kv_budget: int | str | None = None,
        cpu_memory: int | str | None = None,
        policy: str = "auto",
        cpu_cache_dtype: torch.dtype | None = None,
        workspace: int | str | None = None,
        hardware: Hardware | None = None,
        page_size: int = PAGE_SIZE,
        device: Device | None = None,
    ) -> None:
        _check_kinds(config, hardware, page_size, device)
        if (gpu_memory is None) == (kv_budget is None):
            raise ArgumentError(f"give one of gpu_memory and kv_budget, got {gpu_memory!r} and {kv_budget!r}")
        self._gpu_memory = None if gpu_memory is None else read_bytes("gpu_memory", gpu_memory)
        self._kv_budget = None if kv_budget is None else read_bytes("kv_budget", kv_budget)
        self._cpu_memory = _free_host_memory() if cpu_memory is None else read_bytes("cpu_memory", cpu_memory)
        # "resident" is no choice: with every policy, layers that fit on the device stay there.
        self._policy = read_policy(policy, [Policy.CLASSICAL, Policy.COOPERATIVE, Policy.HYBRID])
        self._hardware, self._device = hardware, device
        if cpu_cache_dtype is not None and cpu_cache_dtype not in LARGEST_STORED:
            allowed = ", ".join(str(one).removeprefix("torch.") for one in LARGEST_STORED)
            raise ArgumentError(f"cpu_cache_dtype={cpu_cache_dtype} must be None or one of {allowed}")
        self._cpu_cache_dtype, self._page_size = cpu_cache_dtype, page_size
        self.policy = Policy.RESIDENT  # the current policy
        self._store: CooperativeKVStore | None = None
        self._padding_of = PaddingOf()
        self._half: Half | None = None
        config = config.get_text_config(decoder=True)
        layers = dynamic_layers(config)
        self._keeps_latents = keeps_latents(config)
        self._model = model_shape(config)
        self._workspace = prompt_workspace(self._model) if workspace is None else read_bytes("workspace", workspace)
        full = [index for index, layer in enumerate(layers) if type(layer) is DynamicLayer or _has_indexer(layer)]
        if not full:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
            raise ArgumentError(f"no layer of {type(config).__name__} keeps all tokens ({kinds}): use a DynamicCache")
        positions = {layer: position for position, layer in enumerate(full)}
        super().__init__(
            layers=[
                (IndexedLayer if _has_indexer(layer) else StoredLayer)(self, positions[index])
                if index in positions
                else self._other_layer(layer)
                for index, layer in enumerate(layers)
            ]
        )

    @property
    def length(self) -> int:
        """Tokens of every sequence that all layers hold, without those of a current or interrupted forward pass."""
        windows = (layer.cumulative_length for layer in self.layers if isinstance(layer, WindowLayer))
        return min([0 if self._store is None else self._store.length, *windows])

    @property
    def usage(self) -> Usage:
        """Where the cache lives, without layers with a window."""
        return Usage(0, 0, 0, 0) if self._store is None else self._store.usage

    def caps(self, device: torch.device) -> MemoryCaps:
        """Bytes that keys and values may take, by the given budgets and the memory that is in use on the device now."""
        remedy = "raise gpu_memory" if self._kv_budget is None else "raise kv_budget"
        gpu = self._kv_budget
        if gpu is None:
            assert self._gpu_memory is not None
            gc.collect()  # a cache and its layers refer to each other, so a dropped cache may still hold its memory
            taken = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
            gpu = max(self._gpu_memory - taken - self._workspace, 0)
        return MemoryCaps(gpu, self._cpu_memory, remedy)

    def hold(self, half: Half) -> None:
        """Makes this the cache of one half of a batch, or of its only sequence, from the next first tokens on."""
        self._half = half

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """`length`, of any layer."""
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last -tokens_to_remove tokens of every sequence."""
        if tokens_to_remove > 0:
            raise ArgumentError(f"tokens_to_remove={tokens_to_remove} must not be positive: -3 forgets three tokens")
        length = max(self.length + tokens_to_remove, 0)
        for layer in self._others():
            layer.crop(tokens_to_remove)
        if self._store is not None:
            self._store.truncate(length)

    def undo_last_pass(self, length: int) -> None:
        """Treats the last forward pass as interrupted. length: tokens of every sequence before it."""
        if self._store is not None and self._store.length > length:
            self._store.truncate(length)
        for layer in self.layers:
            if isinstance(layer, WindowLayer):
                layer.undo_interrupted()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i continues from sequence beam_idx[i]. Waits for the device."""
        self._select(beam_idx.tolist())
        for layer in self._others():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence `repeats` times."""
        self._select([row for row in range(self._batch_size()) for _ in range(repeats)])
        for layer in self._others():
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps only the given sequences. Waits for the device."""
        self._select(torch.arange(self._batch_size(), dtype=torch.int64, device="cpu")[indices.cpu()].tolist())
        for layer in self._others():
            layer.batch_select_indices(indices)

    def reset(self) -> None:
        """Forgets all tokens and the batch size, and frees the memory."""
        self._store = None
        for layer in self._others():
            layer.reset()
        for layer in self._indexed():
            layer.forget()

    def append(self, index: int, k: Tensor, v: Tensor) -> StoredTokens | None:
        """The StoredTokens of layer `index` with k and v, (batch_size, seqlen_new, nheads_k, headdim), to append.

        None for the first tokens of all, which are stored at once: there are no others to attend to. k and v of models
        with latents are their two parts.
        """
        if self._keeps_latents:
            k, v = joined(k, v)
        if self._store is None:
            self._store = self._make_store(k, v)
        store = self._store
        if index == 0 and store.length_of(0) > (held := self.length):
            store.truncate(held)  # an earlier forward pass ended early
        if store.length_of(index) == 0:
            store.append(index, k, v)
            return None
        return StoredTokens(store, index, NewTokens(k, v), self._padding_of)

    def _other_layer(self, layer: Any) -> Any:
        """The cache of a layer that does not keep all tokens. layer: Transformers' own cache of it."""
        return WindowLayer(self, layer.sliding_window) if type(layer) is DynamicSlidingWindowLayer else layer

    def _others(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, StoredLayer)]

    def _indexed(self) -> list[IndexedLayer]:
        return [layer for layer in self.layers if isinstance(layer, IndexedLayer)]

    def _batch_size(self) -> int:
        return 0 if self._store is None else self._store.batch_size

    def _select(self, rows: list[int]) -> None:
        if self._store is not None:
            self._store.select(rows)
        for layer in self._indexed():
            layer.select_rows(rows)

    def _make_store(self, k: Tensor, v: Tensor) -> CooperativeKVStore:
        batch_size, _, nheads_k, headdim = k.shape
        device = self._device or cuda_device(k.device)
        shape = PageShape(
            self._page_size, nheads_k, headdim, v.shape[3], k.dtype, self._cpu_cache_dtype, self._keeps_latents
        )
        if self._hardware is None:
            self._hardware = hardware_around(device.torch_device, shape, self._model.nheads)
        caps = self.caps(k.device) if self._half is None else self._half.caps
        caps = caps._replace(gpu=max(caps.gpu - self._window_bytes(batch_size, k.dtype), 0))
        count = sum(isinstance(layer, StoredLayer) for layer in self.layers)
        with torch.inference_mode(False):  # later calls write this memory in any mode
            return CooperativeKVStore(count, batch_size, shape, device, caps, partial(self._share, caps.gpu))

    def _window_bytes(self, batch_size: int, dtype: torch.dtype) -> int:
        """Bytes that layers with a window may take on the GPU."""
        return OffloadWorkload(self._model_in(dtype), batch_size, sys.maxsize).window_kv_bytes

    def _model_in(self, dtype: torch.dtype) -> ModelShape:
        return replace(self._model, dtype_bytes=dtype.itemsize)

    def _share(self, gpu_bytes: int, num_layers_cpu: int, tokens: int) -> float:
        """The share of layers on the CPU that every step uploads, when the store may take gpu_bytes of the GPU."""
        assert self._hardware is not None
        assert self._store is not None
        batch_size = self._store.batch_size if self._half is None else self._half.batch_size
        predict: Predict = seconds_per_token if self._half is None else seconds_per_token_in_halves
        model = self._model_in(self._store.shape.dtype)
        workload = OffloadWorkload(model, batch_size, tokens, self._cpu_cache_dtype is not None, self._page_size)
        staging = workload.staging_bytes(gpu_bytes)
        if 0 < model.selected_keys < tokens:
            self.policy = Policy.GATHERED
            return 0.0
        policies = [self._policy] if self._policy else [Policy.CLASSICAL, Policy.COOPERATIVE, Policy.HYBRID]
        hardware = self._hardware
        self.policy = min(policies, key=lambda one: predict(one, workload, hardware, num_layers_cpu, staging))
        return upload_fraction(self.policy, workload, hardware, num_layers_cpu, staging, predict)


def _has_indexer(layer: Any) -> bool:
    """Whether a layer's cache also keeps keys of its indexer."""
    return hasattr(layer, "update_indexer")


def dynamic_layers(config: PretrainedConfig) -> list[Any]:
    """Transformers' own cache of each layer, empty. Raises ArgumentError for a configuration without one."""
    try:
        return list(DynamicCache(config=config).layers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"Transformers makes no DynamicCache for the config of this model, {type(config).__name__}: {error!r}"
        ) from error


def keeps_latents(config: PretrainedConfig) -> bool:
    """Whether caches of this configuration's model hold latents (MLA)."""
    if getattr(config, "kv_lora_rank", None) is None:
        return False
    import_modeling(type(config))
    if builds_masks_of_indices(config):
        raise ArgumentError(
            f"the indexer of a {type(config).__name__} reads the keys of its cache itself: use a DynamicCache"
        )
    return serve_latents(config)


def model_shape(config: PretrainedConfig) -> ModelShape:
    """Dimensions of a model, by its configuration; those of the MLP are guesses for unusual models.

    A model with latents has one key head, whose keys are latents, and values in them.
    Raises ArgumentError for a model without attention, or with layers of different dimensions.
    """
    nheads, hidden_size = _dimension(config, "num_attention_heads"), _dimension(config, "hidden_size")
    dtype = getattr(config, "dtype", None)
    layers = dynamic_layers(config)
    windows = {
        index: layer.sliding_window
        for index, layer in enumerate(layers)
        if isinstance(layer, DynamicSlidingWindowLayer)
    }
    latent = keeps_latents(config)
    rank = _dimension(config, "kv_lora_rank") if latent else 0
    topk = getattr(config, "index_topk", None) if any(map(_has_indexer, layers)) else None
    return ModelShape(
        name=config.model_type,
        num_layers=len(layers),
        nheads=nheads,
        nheads_k=1 if latent else _dimension(config, "num_key_value_heads", nheads),
        headdim=rank + config.qk_rope_head_dim if latent else _dimension(config, "head_dim", hidden_size // nheads),
        headdim_v=rank,
        values_in_keys=latent,
        expanded_headdim=config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim if latent else 0,
        selected_keys=topk or 0,
        indexer_headdim=config.index_head_dim if topk else 0,
        hidden_size=hidden_size,
        intermediate_size=_dimension(config, "intermediate_size", 4 * hidden_size),
        vocab_size=_dimension(config, "vocab_size"),
        dtype_bytes=dtype.itemsize if isinstance(dtype, torch.dtype) else 2,
        window=max(windows.values(), default=None),
        window_layers=frozenset(windows),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
    )


def _dimension(config: PretrainedConfig, name: str, default: int | None = None) -> int:
    """A positive number of a configuration; None and 0 stand for `default`, if there is one."""
    try:
        value = getattr(config, name, default) or default
    except RuntimeError as error:  # Transformers raises it for a configuration with one value for each layer
        raise ArgumentError(
            f"config, a {type(config).__name__}, has a {name} for each layer; use a DynamicCache"
        ) from error
    if type(value) is not int or value < 1:
        raise ArgumentError(
            f"config must be that of a model that generates text with attention, with one {name} of at least 1 for all "
            f"layers; this {type(config).__name__} has {'none' if value is None else repr(value)}"
        )
    return value


def _check_kinds(config: object, hardware: object, page_size: object, device: object) -> None:
    """Raises ArgumentError for errors that would otherwise show at the first token."""
    if not isinstance(config, PretrainedConfig):
        raise ArgumentError(f"config must be that of a model of Transformers, got {type(config).__name__}")
    if hardware is not None and not isinstance(hardware, Hardware):
        raise ArgumentError(f"hardware must be a Hardware (offload/hardware.py) or None, got {hardware!r}")
    if type(page_size) is not int or page_size < 1:
        raise ArgumentError(f"page_size={page_size!r} must be an integer of at least 1 token")
    if isinstance(device, (str, torch.device)):
        raise ArgumentError(f"device={device!r} must be a Device (offload/device.py) or None, the GPU of the model")


def _free_host_memory() -> int:
    """Bytes of free host memory that keys and values may take."""
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") * HOST_SHARE)
