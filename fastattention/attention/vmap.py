"""torch.vmap over the operators of `fastattention.attention.ops`: the mapped axis joins the batch where it can.

Other calls run once for each index of that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastattention.errors import UnsupportedError

Dims = Sequence[int | None]  # the mapped axis of each argument; None where there is none


def vmap_attention(info: Any, in_dims: Dims, *arguments: Any) -> tuple[Any, Any]:
    """The rule of `fastattention::attention`, in the form that torch.library.register_vmap asks for."""
    q, k, v, cu_seqlens_q, _, _, alibi_slopes, attn_bias, _, dropout_seed, block_mask = arguments[:11]
    sinks_dim = in_dims[8]
    if cu_seqlens_q is not None or sinks_dim is not None or dropout_seed is not None:
        return _one_by_one(torch.ops.fastattention.attention, info.batch_size, in_dims, arguments)
    size, (q_dim, k_dim, v_dim), alibi_dim, bias_dim = info.batch_size, in_dims[:3], in_dims[6], in_dims[7]
    folded = list(arguments)
    folded[:3] = [_fold(x, dim, size) for x, dim in ((q, q_dim), (k, k_dim), (v, v_dim))]
    batch_size = folded[0].shape[0] // size
    if alibi_slopes is not None:
        folded[6] = _fold_broadcast(alibi_slopes, alibi_dim, size, batch_size, 2)
    if attn_bias is not None:
        folded[7] = _fold_broadcast(attn_bias, bias_dim, size, batch_size, 4)
    if block_mask is not None:
        folded[10] = _fold_broadcast(block_mask, in_dims[10], size, batch_size, 4)
    out, lse = torch.ops.fastattention.attention(*folded)
    if lse.dim() == 1:  # nobody asked for it
        return (out.unflatten(0, (size, batch_size)), lse), (0, None)
    return (out.unflatten(0, (size, batch_size)), lse.unflatten(0, (size, batch_size))), (0, 0)


def vmap_attention_backward(info: Any, in_dims: Dims, *arguments: Any) -> tuple[Any, Any]:
    """The rule of `fastattention::attention_backward`."""
    return _one_by_one(torch.ops.fastattention.attention_backward, info.batch_size, in_dims, arguments)


def vmap_attention_kvcache(info: Any, in_dims: Dims, *arguments: Any) -> tuple[Any, Any]:
    """The rule of `fastattention::attention_kvcache`. Raises UnsupportedError where all would append to one cache."""
    appends, cache_dims = arguments[3] is not None, in_dims[1:3]
    if appends and None in cache_dims:
        name = ("k_cache", "v_cache")[cache_dims.index(None)]
        raise UnsupportedError(f"vmap does not map {name}, which every index of the mapped axis would append to")
    return _one_by_one(torch.ops.fastattention.attention_kvcache, info.batch_size, in_dims, arguments)


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped axis and the batch as one axis."""
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _fold_broadcast(tensor: Tensor, dim: int | None, size: int, batch_size: int, rank: int) -> Tensor:
    """The same for a tensor that may lack leading axes, or the batch, which it then broadcasts to."""
    if dim is None and (tensor.dim() < rank or tensor.shape[0] == 1):
        return tensor
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    full = mapped.reshape(size, *(1,) * (rank + 1 - mapped.dim()), *mapped.shape[1:])
    return full.expand(size, batch_size, *full.shape[2:]).flatten(0, 1)


def _one_by_one(operator: Callable[..., Any], size: int, in_dims: Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """Runs the operator for each index of the mapped axis and stacks what it returns."""
    results = [
        operator(*(x if dim is None else x.select(dim, index) for x, dim in zip(arguments, in_dims, strict=True)))
        for index in range(size)
    ]
    stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
    returned, dims = type(results[0]), [0] * len(stacked)
    return returned(stacked), returned(dims)
