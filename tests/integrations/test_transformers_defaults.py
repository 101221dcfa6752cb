"""A default device or dtype that a user has set changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiers import sampled
from torch import Tensor
from transformers import DynamicCache

from fastattention.integrations.transformers import FastAttentionCache, MicroBatchedCache, overlapped
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.budgets import LENGTH, NUM_LAYERS, cache_arguments
from integrations.models import DECODERS, ENCODERS, assert_same, deep, make_cache, padding_mask, pair, prompts

DEVICES = ["meta", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(params=[*DEVICES, torch.bfloat16, torch.float64], ids=str)
def _other_default(request: pytest.FixtureRequest) -> Iterator[None]:
    """A default device or dtype that a user has set."""
    if isinstance(request.param, str):
        with torch.device(request.param):
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def _as_usual(make: Callable[[], Any]) -> Any:
    """The result of `make` under torch's own defaults."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return make()
    finally:
        torch.set_default_dtype(dtype)
        assert torch.get_default_device() == device


@sampled
@pytest.mark.usefixtures("_other_default")
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", [*DECODERS, *ENCODERS])
def test_defaults_of_torch_change_nothing(name: str, side: str) -> None:
    """Logits, and gradients, of a prompt; then a step of decoding into each kind of cache."""
    fast, ids, mask = _as_usual(lambda: (pair(name).fast, prompts(), padding_mask(side)))
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)

    def run() -> list[Tensor]:
        weight = next(fast.parameters())
        given = {"use_cache": False} if name in DECODERS else {}
        logits = fast(ids, attention_mask=mask, **given).logits
        results = [logits, torch.autograd.grad(logits.float().square().sum(), weight)[0]]
        for cache in ("dynamic", "static") if name in DECODERS else ():
            past = _as_usual(functools.partial(make_cache, cache, fast))
            with torch.no_grad():
                # Transformers' sliding caches cannot begin under another default device.
                _as_usual(functools.partial(fast, ids, attention_mask=mask, **{CACHE_ARGUMENT: past}))
                results.append(fast(ids[:, :1], attention_mask=longer, **{CACHE_ARGUMENT: past}).logits)
        return results

    found = run()
    for one, other in zip(found, _as_usual(run), strict=True):
        assert one.device.type == "cpu"
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.usefixtures("_other_default")
@pytest.mark.parametrize("make", [FastAttentionCache, MicroBatchedCache])
def test_a_cache_within_a_budget_computes_the_same(make: Any) -> None:
    model, ids, mask = _as_usual(
        lambda: (deep("llama", NUM_LAYERS), prompts(length=LENGTH), padding_mask("left", 3, LENGTH))
    )
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)

    def run(cache: Any) -> list[Tensor]:
        with torch.no_grad(), overlapped(model, cache) if isinstance(cache, MicroBatchedCache) else nullcontext():
            given = ((ids, mask), (ids[:, :1], longer))
            return [model(new, attention_mask=seen, **{CACHE_ARGUMENT: cache}).logits for new, seen in given]

    budget = cache_arguments(140_000, None, {})
    found = run(make(model.config, **budget))
    expected = _as_usual(lambda: run(DynamicCache(config=model.config)))
    for one, other, real in zip(found, expected, (mask, longer[:, -1:]), strict=True):
        assert one.dtype is other.dtype
        _as_usual(functools.partial(assert_same, one, other, real))
