"""The layout of keys, values and scales within vLLM's cache tensor.

vLLM gives a layer one tensor (num_blocks, num_kv_heads, block_size, content), in which each block of a head is one
contiguous run of memory. Within such a run we put

    keys (block_size, head_size) | values (block_size, head_size)

as vLLM's own CPU backend does, and for quantized caches the scales after them, in the bytes that they add to content:

    ... | scales of keys (block_size,) | scales of values (block_size,)     float32

So the tokens of a page are contiguous for the kernels, and scales are aligned for any head_size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from fastattention import ArgumentError
from torch import Tensor

BLOCK_SIZE_MULTIPLE = 16
SCALE_BYTES = 4  # float32

# The largest value that elements of a quantized cache are scaled to, as in fastattention's own append.
LARGEST_STORED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class CachePages(NamedTuple):
    """Views of one layer's cache, as fastattention takes them."""

    k: Tensor  # (num_blocks, block_size, num_kv_heads, head_size)
    v: Tensor  # as k
    k_scale: Tensor | None  # float32 (num_blocks, block_size, num_kv_heads) of a quantized cache
    v_scale: Tensor | None  # as k_scale

    def write(self, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stores token i of key and value, (num_tokens, num_kv_heads, head_size), in slot slot_mapping[i].

        Slot s is token s % block_size of block s // block_size. A padding token has slot -1 and goes to slot 0: block
        0 is vLLM's null block, which no request reads. Filtering it out would make a GPU wait for the host.
        """
        slots = slot_mapping.clamp(min=0)
        block_size = self.k.shape[1]
        where = slots // block_size, slots % block_size
        for pages, scales, tokens in ((self.k, self.k_scale, key), (self.v, self.v_scale, value)):
            if scales is None:
                pages[where] = tokens
            else:
                stored, scales[where] = quantize(tokens, pages.dtype)
                pages.view(torch.int8)[where] = stored.view(torch.int8)  # torch's CPU indexing does not take float8


def cache_pages(kv_cache: Tensor, head_size: int, quantized_dtype: torch.dtype | None) -> CachePages:
    """Views of keys, values and scales in `kv_cache`, (num_blocks, num_kv_heads, block_size, content).

    - `quantized_dtype`: dtype of a quantized cache; None for a cache in the dtype of kv_cache

    Raises ArgumentError when kv_cache has another layout.
    """
    content = 2 * head_size + (2 * SCALE_BYTES if quantized_dtype is not None else 0)
    _check(kv_cache, content)
    num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    runs = kv_cache.view(num_blocks, num_kv_heads, -1)  # (num_blocks, num_kv_heads, block_size * content)
    if quantized_dtype is not None:
        runs = runs.view(quantized_dtype)
    size = block_size * head_size
    by_head = (num_blocks, num_kv_heads, block_size, head_size)
    k, v = (runs[..., start : start + size].view(by_head).transpose(1, 2) for start in (0, size))
    if quantized_dtype is None:
        return CachePages(k, v, None, None)
    k_scale, v_scale = runs[..., 2 * size :].view(torch.float32).transpose(1, 2).chunk(2, dim=1)
    return CachePages(k, v, k_scale, v_scale)


def quantize(x: Tensor, stored_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(stored, scale) of x (..., head_size), by the formula of `fast_attn_with_kvcache`'s append.

    scale, float32 (...), is the largest |element| / 127 for int8, / 448 for float8, and stored is x / scale, rounded
    to nearest even. A token with an element that is not finite gets scale NaN.
    """
    x = x.float()
    largest = LARGEST_STORED[stored_dtype]
    amax = x.abs().amax(dim=-1, keepdim=True)
    finite = amax.isfinite()
    # A token of zeros has amax 0 and an infinite factor.
    factor = (torch.full_like(amax, largest) / amax).clamp(max=torch.finfo(torch.float32).max)
    stored = torch.where(finite, x * factor, 0.0).clamp(-largest, largest)
    if stored_dtype is torch.int8:
        stored = stored.round()
    return stored.to(stored_dtype), torch.where(finite, amax / largest, torch.nan).squeeze(-1)


def _check(kv_cache: Tensor, content: int) -> None:
    shape, strides = tuple(kv_cache.shape), kv_cache.stride()
    if len(shape) != 4 or shape[3] != content:
        raise ArgumentError(f"kv_cache must be (num_blocks, num_kv_heads, block_size, {content}), got shape {shape}")
    if shape[2] % BLOCK_SIZE_MULTIPLE:
        raise ArgumentError(f"block_size={shape[2]} of kv_cache must be a multiple of {BLOCK_SIZE_MULTIPLE}")
    if strides[3] != 1 or strides[2] != content:
        raise ArgumentError(
            f"kv_cache must be contiguous in its last two axes (layout LBHNC), got strides {strides} of shape {shape}"
        )
