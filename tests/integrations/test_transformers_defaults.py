"""A default device or dtype that a user has set changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from integrations.models import DECODERS, ENCODERS, make_cache, padding_mask, pair, prompts


@pytest.fixture(params=["meta", torch.bfloat16, torch.float64], ids=str)
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
    """What `make` returns under torch's own defaults."""
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            return make()
    finally:
        torch.set_default_dtype(dtype)
        assert torch.get_default_device() == device


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
