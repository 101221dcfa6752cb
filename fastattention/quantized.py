"""Quantized values: int8 or float8 (e4m3) with one float32 scale per token and head.

A key or value of a cache is its stored elements times its scale, by the formula of `quantize`. Queries that are
multiplied in int8 (`qk_dtype`) are quantized by it too, and their keys by `quantize_keys`. Native kernels repeat these
formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The dtypes of quantized caches, with the largest value that elements are scaled to.
LARGEST_STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
KEYS_OF_SCALE = 64  # neighbouring keys, from token 0 on, that share a scale in `quantize_keys`


def quantize(x: Tensor, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored, scale) of x (..., headdim), computed in float32: stored has x's shape, scale lacks the last axis.

    With amax the largest |x| of the last axis, scale = amax / largest and stored = x * (largest / amax), rounded to
    nearest even. Rows of zeros have scale 0. For a row with an element that is not finite the scale is NaN, so that the
    error shows, and 0 is stored.
    """
    x = x.float()
    largest = LARGEST_STORED[cache_dtype]
    amax = x.abs().amax(dim=-1, keepdim=True)
    # Both operands are tensors: torch computes a number divided by a tensor as the number times its reciprocal, which
    # rounds twice. The result is finite even if the reciprocal of a tiny amax is not.
    factor = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    stored = torch.where(amax.isfinite(), x * factor, 0.0).clamp(-largest, largest)
    if cache_dtype is torch.int8:
        stored = stored.round()
    scale = torch.where(amax.isfinite(), amax / largest, torch.nan)
    return stored.to(cache_dtype), scale.squeeze(-1)


def dequantize(stored: Tensor, scale: Tensor) -> Tensor:
    """The float32 values of `stored` (..., headdim) and `scale` (...)."""
    return stored.float() * scale.unsqueeze(-1)


def quantize_keys(k: Tensor, qk_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, scale, mean) of the keys of one sequence, k (seqlen_k, nheads_k, headdim), for products with queries.

    The mean of keys over the tokens, float32 (nheads_k, headdim), is subtracted: the rest is smaller, and a softmax
    does not change when all scores of a query shift. The mean is rounded to bfloat16, which hides most effects of the
    order of summation; elements that are not finite count as 0. Then every KEYS_OF_SCALE keys are quantized as one row
    of `quantize`.
    scale: float32 (seqlen_k, nheads_k)
    """
    finite = torch.where(k.isfinite(), k.double(), 0.0)
    mean = (finite.sum(dim=0) / max(len(k), 1)).bfloat16().float()
    # Rows are (groups, nheads_k, keys * headdim). Zeros after the last key change no scale.
    smoothed = torch.nn.functional.pad(k.float() - mean, (0, 0, 0, 0, 0, -len(k) % KEYS_OF_SCALE))
    groups = smoothed.unflatten(0, (-1, KEYS_OF_SCALE)).transpose(1, 2)  # type: ignore[no-untyped-call]
    stored, scale = quantize(groups.flatten(2), qk_dtype)
    stored = stored.view(groups.shape).transpose(1, 2).flatten(0, 1)[: len(k)]
    return stored, scale.repeat_interleave(KEYS_OF_SCALE, dim=0)[: len(k)], mean
