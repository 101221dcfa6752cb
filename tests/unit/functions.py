"""One call of every public function that can be traced, for tests that do the same with each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention import (
    fast_attn_func,
    fast_attn_kvpacked_func,
    fast_attn_qkvpacked_func,
    fast_attn_varlen_func,
    fast_attn_varlen_kvpacked_func,
    fast_attn_varlen_qkvpacked_func,
    fast_attn_with_kvcache,
)


@dataclass(frozen=True)
class FunctionCall:
    """A call, without the values of its tensors."""

    name: str
    function: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]
    indices: dict[str, list[Any]]  # int32 tensors
    scalars: dict[str, Any]
    int8: tuple[str, ...] = ()  # tensors that are int8; the others in `shapes` are float32
    bools: tuple[str, ...] = ()  # tensors that are bool

    def tensors(self) -> dict[str, Tensor]:
        """Tensors with the same values each time."""
        generator = torch.Generator().manual_seed(0)
        drawn = {name: torch.randn(shape, generator=generator) for name, shape in self.shapes.items()}
        drawn |= {name: (40.0 * drawn[name]).to(torch.int8) for name in self.int8}
        drawn |= {name: drawn[name] > -1.0 for name in self.bools}
        return drawn | {name: torch.tensor(values, dtype=torch.int32) for name, values in self.indices.items()}

    def run(self, tensors: dict[str, Tensor], backend: str = "sdpa") -> tuple[Tensor, ...]:
        """All results of the call."""
        result = self.function(**tensors, **self.scalars, backend=backend)
        return result if isinstance(result, tuple) else (result,)

    @property
    def differentiable(self) -> bool:
        return self.function is not fast_attn_with_kvcache


LENGTHS = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 5, 7]}
DENSE = {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 16)}
VARLEN = {"q": (6, 4, 8), "k": (7, 2, 8), "v": (7, 2, 16)}
PER_HEAD = {"alibi_slopes": (4,), "sinks": (4,)}
NEW_TOKENS = {"k": (2, 2, 2, 8), "v": (2, 2, 2, 16), "rotary_cos": (16, 4), "rotary_sin": (16, 4)}
SCALES = {"k_scale": (5, 4, 2), "v_scale": (5, 4, 2)}
MASK = {"block_mask": (2, 4, 1, 1)}
CACHE_OF_PAGES = {"q": (2, 2, 4, 8), "k_cache": (5, 4, 2, 8), "v_cache": (5, 4, 2, 16)} | NEW_TOKENS
IN_PAGES = {"cache_seqlens": [3, 5], "block_table": [[0, 4], [1, 2]]}
EVERYTHING = {"causal": True, "window_size": (3, -1), "softcap": 4.0, "softmax_scale": 0.4, "return_lse": True}

CALLS = (
    FunctionCall("dense", fast_attn_func, DENSE, {}, {"causal": True}),
    FunctionCall("dense_everything", fast_attn_func, DENSE | PER_HEAD | {"attn_bias": (5, 7)}, {}, EVERYTHING),
    FunctionCall(
        "dense_blocks", fast_attn_func, DENSE | MASK, {}, {"causal": True, "block_size": 64}, bools=("block_mask",)
    ),
    FunctionCall("qkvpacked", fast_attn_qkvpacked_func, {"qkv": (2, 5, 3, 4, 8)}, {}, {}),
    FunctionCall("kvpacked", fast_attn_kvpacked_func, {"q": (2, 5, 4, 8), "kv": (2, 7, 2, 2, 8)}, {}, {}),
    FunctionCall("varlen", fast_attn_varlen_func, VARLEN, LENGTHS, {"causal": True}),
    FunctionCall(
        "varlen_blocks", fast_attn_varlen_func, VARLEN | MASK, LENGTHS, {"return_lse": True}, bools=("block_mask",)
    ),
    FunctionCall(
        "varlen_everything", fast_attn_varlen_func, VARLEN | PER_HEAD | {"attn_bias": (1, 6, 5)}, LENGTHS,
        EVERYTHING | {"max_seqlen_q": 4, "max_seqlen_k": 5},
    ),
    FunctionCall(
        "varlen_paged", fast_attn_varlen_func, {"q": (6, 4, 8), "k": (4, 4, 2, 8), "v": (4, 4, 2, 16)},
        LENGTHS | {"block_table": [[3, 0], [2, 1]]}, {},
    ),
    FunctionCall(
        "varlen_qkvpacked", fast_attn_varlen_qkvpacked_func, {"qkv": (6, 3, 4, 8)}, {"cu_seqlens": [0, 2, 6]}, {}
    ),
    FunctionCall("varlen_kvpacked", fast_attn_varlen_kvpacked_func, {"q": (6, 4, 8), "kv": (7, 2, 2, 8)}, LENGTHS, {}),
    FunctionCall(
        "kvcache_read", fast_attn_with_kvcache, {"q": (2, 1, 4, 8), "k_cache": (2, 8, 2, 8), "v_cache": (2, 8, 2, 16)},
        {}, {"cache_seqlens": 5},
    ),
    FunctionCall(
        "kvcache_append", fast_attn_with_kvcache, CACHE_OF_PAGES | {"k_cache": (3, 8, 2, 8), "v_cache": (3, 8, 2, 16)},
        {"cache_seqlens": [3, 5], "cache_batch_idx": [2, 0], "cache_leftpad": [1, 0]}, {"causal": True},
    ),
    FunctionCall(
        "kvcache_append_paged", fast_attn_with_kvcache, CACHE_OF_PAGES | PER_HEAD, IN_PAGES,
        EVERYTHING | {"rotary_interleaved": False},
    ),
    FunctionCall(
        "kvcache_append_int8", fast_attn_with_kvcache, CACHE_OF_PAGES | SCALES, IN_PAGES, {"causal": True},
        int8=("k_cache", "v_cache"),
    ),
)  # fmt: skip
every_call = pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
