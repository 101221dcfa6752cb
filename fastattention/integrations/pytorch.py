"""torch's scaled_dot_product_attention on fastattention: for code that calls it, such as diffusers, timm or your own.

from fastattention.integrations import pytorch

with pytorch.install():          # or install() for the whole process
    images = pipeline(prompt)    # code that calls torch.nn.functional.scaled_dot_product_attention
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from fastattention.attention.interface import fast_attn_func
from fastattention.attention.problem import MAX_HEADDIM, MAX_HEADDIM_V
from fastattention.backends.sdpa.fused import torch_attention
from fastattention.engine.checks import DTYPES
from fastattention.engine.eager import autocast_dtype
from fastattention.integrations.pair_masks import pair_mask_of


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention, with its arguments, results and errors.

    - `query`: (..., nheads, seqlen_q, headdim); `key`: (..., nheads_k, seqlen_k, headdim); `value`: (..., nheads_k,
        seqlen_k, headdim_v). Leading axes broadcast. nheads_k is nheads or 1; with `enable_gqa` it divides nheads.
    - `attn_mask`: broadcasts to (..., nheads, seqlen_q, seqlen_k); bool, True is seen, or added to the scores
    - `is_causal`: query i sees keys 0 to i: the mask is aligned to the **top left**, unlike that of `fast_attn_func`
    - `scale`: None is headdim ** -0.5

    Returns (..., nheads, seqlen_q, headdim_v), as torch's fused kernels do: a view of (..., seqlen_q, nheads,
    headdim_v). Rows without keys are 0. Autocast converts arguments, as it does for torch's function.

    torch's own function computes a call that `fast_attn_func` does not take, or raises its error: other dtypes than
    float16, bfloat16 and float32, head dimensions above 576 or values above 512, axes of size 0, subclasses of Tensor,
    nested tensors, and arguments that do not fit.
    """
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    plain = not has_torch_function(tensors) and all(type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    dtype = autocast_dtype(query.device.type) if plain else None
    if dtype is not None:
        query, key, value = (x.to(dtype) if x.dtype is torch.float32 else x for x in (query, key, value))
        if attn_mask is not None and attn_mask.dtype is torch.float32:
            attn_mask = attn_mask.to(dtype)
    served = plain and _are_served(query, key, value, enable_gqa) and 0.0 <= dropout_p < 1.0
    if not served or not (attn_mask is None or (not is_causal and _is_mask(attn_mask, query, key, value))):
        return torch_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    batch: torch.Size = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])  # type: ignore[no-untyped-call]
    q, k, v = (_tokens_first(x, batch) for x in (query, key, value))
    q, k, v = _with_heads(q, k, v)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    window = (-1, -1)
    if is_causal:
        k, v = k[:, :seqlen_q], v[:, :seqlen_q]
        window = (-1, max(seqlen_q - seqlen_k, 0))  # counted from the last query at the last key
    pairs = None if attn_mask is None or len(batch) > 1 else pair_mask_of(attn_mask, q, k)
    bias = None if attn_mask is None or pairs is not None else _bias(attn_mask, query.dtype, batch)
    out: Tensor = fast_attn_func(q, k, v, dropout_p, scale, window_size=window, attn_bias=bias, block_mask=pairs)
    out = out.transpose(1, 2)
    outer = (*batch, out.shape[1]) if max(query.dim(), key.dim(), value.dim()) > 2 else ()
    return out.reshape(*outer, *out.shape[2:])


@contextlib.contextmanager
def _restoring(before: Any) -> Iterator[None]:
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before


def install() -> contextlib.AbstractContextManager[None]:
    """Puts `scaled_dot_product_attention` in the place of torch.nn.functional's, for all threads.

    Returns a context manager whose end puts the former function back; without `with`, the replacement stays until
    `uninstall`. Code that has imported the function by name keeps the one it has.
    """
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    return _restoring(before)


def uninstall() -> None:
    """Puts torch's own function back."""
    F.scaled_dot_product_attention = torch_attention


def _are_served(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether `fast_attn_func` takes these tensors."""
    if q.is_nested or q.dtype not in DTYPES or not (q.dtype is k.dtype is v.dtype and q.device == k.device == v.device):
        return False
    if min(q.dim(), k.dim(), v.dim()) < 2 or 0 in (*q.shape, *k.shape, *v.shape):
        return False
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return False
    if q.shape[-1] > MAX_HEADDIM or v.shape[-1] > MAX_HEADDIM_V:
        return False
    if enable_gqa and min(q.dim(), k.dim(), v.dim()) > 2:
        heads, heads_k, heads_v = (x.shape[-3] for x in (q, k, v))
        return heads % heads_k == heads % heads_v == 0 and _broadcast(*(x.shape[:-3] for x in (q, k, v)))
    return _broadcast(*(x.shape[:-2] for x in (q, k, v)))


def _is_mask(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a mask fits tensors that are served."""
    if mask.dtype not in (torch.bool, torch.float32, q.dtype) or mask.device != q.device or mask.is_nested:
        return False
    if mask.dim() < 2 or mask.dim() > max(x.dim() for x in (q, k, v)):
        return False
    aligned = zip_longest(*(reversed(x.shape[:-2]) for x in (q, k, v)), fillvalue=1)
    full = (k.shape[-2], q.shape[-2], *map(max, aligned))
    return all(mine in (1, size) for mine, size in zip(reversed(mask.shape), full, strict=False))


def _broadcast(*shapes: torch.Size) -> bool:
    return all(len({*sizes} - {1}) <= 1 for sizes in zip_longest(*map(reversed, shapes), fillvalue=1))


def _tokens_first(x: Tensor, batch: torch.Size) -> Tensor:
    """(batch_size, tokens, heads, headdim) of (..., heads, tokens, headdim). Leading axes broadcast to `batch`."""
    if x.dim() == 2:
        x = x[None]
    return x.expand(*batch, *x.shape[-3:]).reshape(math.prod(batch), *x.shape[-3:]).transpose(1, 2)


def _with_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with heads as `fast_attn_func` takes them: as many of values as of keys, which divide those of q."""
    heads, heads_k, heads_v = (x.shape[2] for x in (q, k, v))
    most = max(heads, heads_k, heads_v)
    if heads_k != heads_v:
        k, v = (x.repeat_interleave(most // x.shape[2], dim=2) for x in (k, v))
    return (q if heads == most else q.expand(-1, -1, most, -1)), k, v


def _bias(mask: Tensor, dtype: torch.dtype, batch: torch.Size) -> Tensor:
    """attn_bias of a mask: added to the scores as it is, or -inf where a bool mask is False."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    if len(batch) == 1 or mask.dim() <= 3:
        return mask
    return mask.expand(*batch, *mask.shape[-3:]).reshape(math.prod(batch), *mask.shape[-3:])
