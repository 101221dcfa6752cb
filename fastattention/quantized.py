"""Quantized numbers: int8 or float8 (e4m3) with one float32 scale per token and head.

A key or value of a cache is its stored numbers times its scale, by the formula of `quantize`. So are queries that are
multiplied in int8 (`qk_dtype`); keys then are by `quantize_keys`. Native kernels repeat these formulas.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a quantized cache may hold, and the largest number that its elements are scaled to.
LARGEST_STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
KEYS_OF_SCALE = 64  # neighbours from token 0 on that share a scale in `quantize_keys`


def quantize(x: Tensor, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored, scale) of x (..., headdim), computed in float32: stored has x's shape, scale lacks the last axis.

    With amax the largest |x| of the last axis, scale = amax / largest and stored = x * (largest / amax), rounded to
    nearest even. Zeros alone have scale 0. With an element that is not finite the scale is NaN, so that nothing is lost
    in silence, and 0 is stored.
    """
    x = x.float()
    largest = LARGEST_STORED[cache_dtype]
    amax = x.abs().amax(dim=-1, keepdim=True)
    # Of two tensors: torch divides a number by a tensor as the number times its reciprocal, which rounds twice. Finite
    # also for amax so small that its reciprocal is not.
    factor = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    stored = torch.where(amax.isfinite(), x * factor, 0.0).clamp(-largest, largest)
    if cache_dtype is torch.int8:
        stored = stored.round()
    scale = torch.where(amax.isfinite(), amax / largest, torch.nan)
    return stored.to(cache_dtype), scale.squeeze(-1)


def dequantize(stored: Tensor, scale: Tensor) -> Tensor:
    """The float32 numbers that `stored` (..., headdim) and `scale` (...) stand for."""
    return stored.float() * scale.unsqueeze(-1)


def quantize_keys(k: Tensor, qk_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, scale, mean) of the keys of one sequence, k (seqlen_k, nheads_k, headdim), for products with queries.

    Keys lose their mean over the tokens, float32 (nheads_k, headdim): the rest is smaller, and a softmax does not see
    what all scores of a query have in common. The mean is rounded to bfloat16, which hides most of what the order of a
    sum changes; elements that are not finite count as 0. Then KEYS_OF_SCALE keys in turn are quantized as one row of
    `quantize`.
    scale: float32 (seqlen_k, nheads_k)
    """
    finite = torch.where(k.isfinite(), k.double(), 0.0)
    mean = (finite.sum(dim=0) / max(len(k), 1)).bfloat16().float()
    # As rows (groups, nheads_k, keys * headdim): zeros behind the last key change no scale.
    smoothed = torch.nn.functional.pad(k.float() - mean, (0, 0, 0, 0, 0, -len(k) % KEYS_OF_SCALE))
    groups = smoothed.unflatten(0, (-1, KEYS_OF_SCALE)).transpose(1, 2)  # type: ignore[no-untyped-call]
    stored, scale = quantize(groups.flatten(2), qk_dtype)
    stored = stored.view(groups.shape).transpose(1, 2).flatten(0, 1)[: len(k)]
    return stored, scale.repeat_interleave(KEYS_OF_SCALE, dim=0)[: len(k)], mean
