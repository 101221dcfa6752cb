"""The arguments with which vLLM makes an attention layer, checked once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from fastattention import ArgumentError, UnsupportedError
from torch import Tensor

MAX_HEAD_SIZE = 512
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# vLLM's names of cache dtypes with one scale for each token and head, and their stored dtypes.
QUANTIZED = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
PLAIN = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
KV_CACHE_DTYPES = (*PLAIN, *QUANTIZED)


@dataclass(frozen=True)
class LayerOptions:
    """The constructor arguments of a vLLM attention layer, under vLLM's names.

    - `num_heads`, `num_kv_heads`: query heads and key/value heads; the second divides the first
    - `head_size`: 1 to 512, for keys and values
    - `scale`: factor on q @ k^T
    - `alibi_slopes`: `num_heads` numbers, or None
    - `sliding_window`: keys that a query sees, itself included; None is unlimited
    - `kv_cache_dtype`: one of KV_CACHE_DTYPES; "auto" is `dtype`
    - `logits_soft_cap`: None or 0 turns it off
    - `sinks`: floating point (num_heads,), or None
    - `dtype`: that of queries, keys and values: float16, bfloat16 or float32

    Raises ArgumentError for a wrong value and UnsupportedError for one that fastattention does not serve.
    """

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int
    alibi_slopes: list[float] | None
    sliding_window: int | None
    kv_cache_dtype: str
    logits_soft_cap: float | None
    sinks: Tensor | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self._check_heads()
        self._check_cache_dtype()
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"dtype={self.dtype} is not supported; allowed are {', '.join(map(str, DTYPES))}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ArgumentError(f"sliding_window={self.sliding_window} must be at least 1, or None for no window")
        cap = self.logits_soft_cap
        if cap is not None and not (math.isfinite(cap) and cap >= 0):
            raise ArgumentError(f"logits_soft_cap={cap} must be finite and at least 0; 0 or None turns it off")
        if not math.isfinite(self.scale):
            raise ArgumentError(f"scale={self.scale} must be finite")

    @property
    def quantized_dtype(self) -> torch.dtype | None:
        """The dtype of a quantized cache, int8 or float8_e4m3fn; None for a cache in `dtype`."""
        return QUANTIZED.get(self.kv_cache_dtype)

    def _check_heads(self) -> None:
        if not 1 <= self.head_size <= MAX_HEAD_SIZE:
            raise UnsupportedError(f"head_size={self.head_size} is not supported; allowed are 1 to {MAX_HEAD_SIZE}")
        if self.num_kv_heads < 1 or self.num_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ArgumentError(
                f"num_heads={self.num_heads} must be a positive multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ArgumentError(
                f"alibi_slopes has {len(self.alibi_slopes)} numbers; needed are num_heads={self.num_heads}"
            )
        if self.sinks is not None and tuple(self.sinks.shape) != (self.num_heads,):
            raise ArgumentError(f"sinks must be (num_heads,) = ({self.num_heads},), got {tuple(self.sinks.shape)}")

    def _check_cache_dtype(self) -> None:
        name = self.kv_cache_dtype
        if name not in KV_CACHE_DTYPES:
            raise UnsupportedError(
                f"kv_cache_dtype={name!r} is not supported; allowed are {', '.join(KV_CACHE_DTYPES)}. fastattention's "
                "quantized caches have one scale a token and head; vLLM's other quantized caches have other scales"
            )
        stored = PLAIN.get(name)
        if stored is not None and stored is not self.dtype:
            raise UnsupportedError(
                f"kv_cache_dtype={name!r} differs from the model's dtype, {self.dtype}; use kv_cache_dtype='auto'"
            )
