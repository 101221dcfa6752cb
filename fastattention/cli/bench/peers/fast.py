"""fastattention as a peer, called through its public functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fastattention
from fastattention.backends.cpu.library import load_library
from fastattention.cli.bench.peers.base import Peer, PreparedPeer, is_backward, is_decode, is_varlen, prepare_backward
from fastattention.cli.bench.workload import BenchWorkload, Tensors, make_gradient


def prepare(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """A call in the best layout: for a decode, caches that store heads first, as caches of Transformers do."""
    if is_backward(workload):
        return prepare_gradients(workload, tensors)
    if is_decode(workload):
        q, k, v = tensors
        tensors = Tensors(q, heads_first(k), heads_first(v))
    return prepare_as_given(workload, tensors)


def prepare_gradients(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """The backward of fast_attn_func."""
    forward = functools.partial(fastattention.fast_attn_func, causal=workload.causal)
    with torch.enable_grad():
        return prepare_backward(
            forward, tensors, make_gradient(workload), lambda gradient: gradient, f"cpu {load_library().isa}"
        )


def heads_first(cache: Tensor) -> Tensor:
    """The same cache (batch_size, seqlen, nheads_k, headdim), stored as (batch_size, nheads_k, seqlen, headdim)."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def prepare_as_given(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """fast_attn_func, fast_attn_with_kvcache for a decode, fast_attn_varlen_func for variable-length sequences."""
    function: Callable[..., Any] = fastattention.fast_attn_func
    arguments: tuple[Any, ...] = tensors
    if is_decode(workload):
        function = fastattention.fast_attn_with_kvcache
    elif is_varlen(workload):
        function = fastattention.fast_attn_varlen_func
        offsets = cumulative(workload.seqlens_q), cumulative(workload.seqlens_k)
        arguments = (*tensors, *offsets, max(workload.seqlens_q), max(workload.seqlens_k))
    chosen = fastattention.explain(*arguments, function=function, causal=workload.causal).backend or ""
    detail = f"cpu {load_library().isa}" if chosen == "cpu" else chosen
    return PreparedPeer(lambda: function(*arguments, causal=workload.causal), lambda out: out, detail)


def prepare_packed_store(workload: BenchWorkload, tensors: Tensors) -> PreparedPeer:
    """A PackedKVStore that holds the keys and values of a decode."""
    q, k, v = tensors
    batch_size, seqlen, nheads_k, headdim = k.shape
    store = fastattention.PackedKVStore(batch_size, seqlen, nheads_k, headdim, dtype=k.dtype)
    store.append(k, v)
    return PreparedPeer(
        lambda: store.attend(q, causal=workload.causal), lambda out: out, detail=f"cpu {load_library().isa}"
    )


def cumulative(seqlens: tuple[int, ...]) -> Tensor:
    """Offsets of variable-length sequences, int32 (batch_size + 1,)."""
    return torch.tensor((0, *seqlens), dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)


FASTATTENTION = Peer(
    "fastattention", applies_to=lambda workload: True, prepare=prepare, version=lambda: fastattention.__version__
)

TOKENS_FIRST = Peer(
    "fastattention, tokens first",
    applies_to=is_decode,
    prepare=prepare_as_given,
    version=lambda: fastattention.__version__,
)

PACKED_CACHE = Peer(
    "fastattention, packed cache",
    applies_to=is_decode,
    prepare=prepare_packed_store,
    version=lambda: fastattention.__version__,
)
