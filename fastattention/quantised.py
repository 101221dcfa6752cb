"""Quantised numbers: int8 or float8 (e4m3) with one float32 scale per token and head.

A key or value of a cache is its stored numbers times its scale. So are queries and keys that are multiplied in int8
(`qk_dtype`), where keys have lost `key_mean` before. The formula is that of `quantise`; native kernels repeat it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# What a quantised cache may hold, and the largest number that its elements are scaled to.
LARGEST_STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise(x: Tensor, cache_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


def dequantise(stored: Tensor, scale: Tensor) -> Tensor:
    """The float32 numbers that `stored` (..., headdim) and `scale` (...) stand for."""
    return stored.float() * scale.unsqueeze(-1)


def key_mean(k: Tensor) -> Tensor:
    """The mean over the tokens of one sequence, k (seqlen_k, nheads_k, headdim): float32 (nheads_k, headdim).

    Keys without their mean have smaller elements to round, and a softmax does not see it: all scores of a query lose
    the same number. It is rounded to bfloat16, which hides in what order it was summed up. Elements that are not
    finite count as 0: they spoil the scores of their own key alone.
    """
    finite = torch.where(k.isfinite(), k.double(), 0.0)
    return (finite.sum(dim=0) / max(len(k), 1)).bfloat16().float()
