"""A store of latents, whose values lie in their keys, and attention to keys that queries select."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiers import sampled

from fastattention.offload.kv_store import MOST_QUERIES_ON_CPU
from fastattention.offload.pages import allocate_pages
from offload.reference_cache import HEADDIM, HEADDIM_V, CachePair, latent_shape, page_shape

pytestmark = pytest.mark.usefixtures("small_buffers")

every_share = pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
CACHE_DTYPES = pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)


def make_pair(share: float = 0.0, **changed: Any) -> CachePair:
    changed.setdefault("shape", latent_shape())
    changed.setdefault("gpu_pages", 25 * changed.get("batch_size", 1))
    return CachePair(share=lambda layers, tokens: share, **changed)


@every_share
@CACHE_DTYPES
@sampled
def test_dense_attention_to_latents(share: float, cache_dtype: torch.dtype | None) -> None:
    pair = make_pair(share, shape=latent_shape(cache_dtype=cache_dtype), nheads=6)
    pair.attend(13)
    pair.steps(30)
    pair.append(9)
    pair.attend(MOST_QUERIES_ON_CPU + 1)
    pair.truncate(37)
    pair.steps(6)
    assert any(pair.store.layers_on_cpu)


@CACHE_DTYPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch_size", [1, 3])
@sampled
def test_selected_latents_come_from_both_sides(
    batch_size: int, dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    pair = make_pair(shape=latent_shape(dtype, cache_dtype), batch_size=batch_size, topk=11, nheads=6)
    pair.attend(13)
    pair.steps(30)
    pair.attend(MOST_QUERIES_ON_CPU)  # the most that gather their keys
    pair.attend(MOST_QUERIES_ON_CPU + 1)  # layers are uploaded
    pair.steps(3)
    pair.truncate(37)
    pair.steps(6)
    pair.select([0] * batch_size)
    pair.steps(6)
    assert any(pair.store.layers_on_cpu)


def test_more_keys_may_be_selected_than_there_are() -> None:
    pair = make_pair(topk=70, options={"softcap": 3.0, "sinks": torch.randn(4)})
    pair.attend(13)
    pair.steps(30)
    assert any(pair.store.layers_on_cpu)


def test_a_latent_takes_memory_once() -> None:
    plain, latent = page_shape(), latent_shape()
    assert latent.token_bytes * 2 * (HEADDIM + HEADDIM_V) == plain.token_bytes * HEADDIM
    pages = allocate_pages(
        latent_shape(cache_dtype=torch.int8), 3, lambda shape, dtype: torch.zeros(shape, dtype=dtype)
    )
    assert sum(x.nbytes for x in pages.tensors()) == 3 * latent_shape(cache_dtype=torch.int8).nbytes
    pages.k.fill_(7)
    assert (pages.v == 7).all()
    assert pages.k_scale is pages.v_scale
