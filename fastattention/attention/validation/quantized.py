"""Checks quantized caches and their scales, from shapes, dtypes and devices alone."""

from __future__ import annotations

import torch

from fastattention.attention.validation.common import check_qkv
from fastattention.engine.checks import TensorSpec, check_shape
from fastattention.errors import ArgumentError
from fastattention.quantized import LARGEST_STORED

_STORED = " or ".join(str(dtype) for dtype in LARGEST_STORED)


def check_stored(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, scales: tuple[TensorSpec | None, TensorSpec | None], axes: str,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> torch.dtype | None:  # fmt: skip
    """Checks dtypes, devices, heads and head dimensions of q, and of caches or pages that may be quantized.

    axes: names of the axes of k; names: of k and v, in errors. Returns the dtype of caches with scales, else None.
    """
    stored = _check_stored_dtype(k, v, scales, names)
    if stored is not None:  # with their scales they stand for values in the dtype of q
        k, v = k._replace(dtype=q.dtype), v._replace(dtype=q.dtype)
    check_qkv(q, k, v, *names)
    for name, scale, cache in zip(("k_scale", "v_scale"), scales, (k, v), strict=True):
        if scale is not None:
            check_scale(name, scale, cache, axes)
    return stored


def _check_stored_dtype(
    k: TensorSpec, v: TensorSpec, scales: tuple[TensorSpec | None, TensorSpec | None], names: tuple[str, str]
) -> torch.dtype | None:
    """The dtype of quantized caches, None for caches in the dtype of q; raises when caches and scales do not agree."""
    quantized = [dtype for dtype in (k.dtype, v.dtype) if dtype in LARGEST_STORED]
    k_scale, v_scale = scales
    have = f"{names[0]} has dtype {k.dtype} and {names[1]} {v.dtype}"
    if (k_scale is None) != (v_scale is None):
        raise ArgumentError(f"k_scale and v_scale must be given together, got only {_given(k_scale)}")
    if k_scale is None or v_scale is None:
        if quantized:
            raise ArgumentError(
                f"{have}, got no k_scale and v_scale; a quantized cache needs them: float32, one number a token and "
                "key head"
            )
        return None
    if len(quantized) < 2 or k.dtype is not v.dtype:
        raise ArgumentError(f"{have}; with k_scale and v_scale both must be {_STORED}")
    return k.dtype


def check_scale(name: str, scale: TensorSpec, cache: TensorSpec, axes: str) -> None:
    """Raises unless `scale` is float32, on the device of its cache and shaped like it without the last axis.

    axes: names of the cache's axes.
    """
    if scale.dtype is not torch.float32:
        raise ArgumentError(f"{name} must be float32, got {scale.dtype}")
    if scale.device != cache.device:
        raise ArgumentError(f"{name} is on {scale.device} and the caches on {cache.device}; they must be the same")
    check_shape(name, scale, tuple(cache.shape[:-1]), axes.rpartition(", ")[0])


def check_not_expanded(name: str, shape: torch.Size, strides: tuple[int, ...]) -> None:
    """Raises when several places of a tensor that is written share memory."""
    if any(step == 0 and size > 1 for step, size in zip(strides, shape, strict=True)):
        raise ArgumentError(f"{name} is expanded, got strides {strides}; appended tokens need memory of their own")


def _given(k_scale: TensorSpec | None) -> str:
    return "v_scale" if k_scale is None else "k_scale"
