"""The interleaved panel layout of a KV cache, which the cpu backend reads in place (attention/panel_cache.hpp).

Keys and values of a head lie in panels of PANEL_SIZE tokens. bfloat16 elements are stored in pairs: two neighbours of a
key's head dimension, or values of two tokens. In the notation of shapes, with pair = 2 for bfloat16 and 1 for other
dtypes:

    k  (batch_size, nheads_k, panels, headdim / pair, PANEL_SIZE, pair)
    v  (batch_size, nheads_k, panels * PANEL_SIZE / pair, headdim_v, pair)

headdim / pair is rounded up; the place of the missing element is 0. What lies beyond a sequence's tokens is arbitrary.
Kernels read whole vectors: there must be SLACK_BYTES of memory after v.
"""

from __future__ import annotations

import torch
from torch import Tensor

PANEL_SIZE = 32
SLACK_BYTES = 64

# The reason with which other backends refuse such a cache.
REFUSAL = "the cache is stored in interleaved panels, which only the cpu backend reads; use a DenseKVStore"


def elements_per_unit(dtype: torch.dtype) -> int:
    """`pair` of the shapes above."""
    return 2 if dtype is torch.bfloat16 else 1


def key_shape(batch_size: int, capacity: int, nheads_k: int, headdim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of k for at least `capacity` tokens."""
    pair = elements_per_unit(dtype)
    return (batch_size, nheads_k, -(-capacity // PANEL_SIZE), -(-headdim // pair), PANEL_SIZE, pair)


def value_shape(batch_size: int, capacity: int, nheads_k: int, headdim_v: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Shape of v for at least `capacity` tokens."""
    pair = elements_per_unit(dtype)
    return (batch_size, nheads_k, -(-capacity // PANEL_SIZE) * PANEL_SIZE // pair, headdim_v, pair)


def keys_from_panels(k: Tensor, capacity: int, headdim: int) -> Tensor:
    """(batch_size, capacity, nheads_k, headdim) of keys in panels, a copy."""
    tokens = k.permute(0, 2, 4, 1, 3, 5).flatten(4).flatten(1, 2)
    return tokens[:, :capacity, :, :headdim].contiguous()


def values_from_panels(v: Tensor, capacity: int) -> Tensor:
    """(batch_size, capacity, nheads_k, headdim_v) of values in panels, a copy."""
    return v.permute(0, 2, 4, 1, 3).flatten(1, 2)[:, :capacity].contiguous()
