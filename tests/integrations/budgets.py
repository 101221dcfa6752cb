"""Shared by tests of caches within a budget: tiny models, and a machine slow enough for them to be offloaded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from offload.fake_device import FakeDevice
from torch import Tensor

from fastattention.integrations.transformers import MicroBatchedCache, overlapped
from fastattention.integrations.transformers.versions import CACHE_ARGUMENT
from fastattention.offload.hardware import Hardware

from .models import deep, padding_mask, prompts

NUM_LAYERS = 6
PAGE_SIZE = 4
LENGTH = 24
POLICIES = ("classical", "cooperative", "hybrid", "auto")
LARGE = 10_000_000  # bytes: everything fits
# The CPU is so slow that even these tiny layers are divided: a third of them is uploaded.
SLOW = Hardware(
    "slow", gpu_bandwidth=1e15, link_bandwidth=1e6, cpu_bandwidth=2e6, dram_bandwidth=3e6, handover_seconds=0.0,
    layer_overhead_seconds=0.0,
)  # fmt: skip


def cache_arguments(kv_budget: int, device: FakeDevice | None, changed: dict[str, Any]) -> dict[str, Any]:
    given = {"kv_budget": kv_budget, "cpu_memory": LARGE, "hardware": SLOW, "page_size": PAGE_SIZE}
    return given | {"device": device or FakeDevice()} | changed


def generate(name: str, cache: Any, **changed: Any) -> Tensor:
    """Generates for three sequences with padding on the left: an odd batch."""
    given = {"inputs": prompts(length=LENGTH), "attention_mask": padding_mask("left", length=LENGTH)}
    given |= {"max_new_tokens": 12, "do_sample": False, CACHE_ARGUMENT: cache} | changed
    with _overlapped(name, cache):
        tokens: Tensor = deep(name, NUM_LAYERS).generate(**given)
    return tokens


def call(name: str, cache: Any, tokens: Tensor, **given: Any) -> Any:
    with torch.no_grad(), _overlapped(name, cache):
        return deep(name, NUM_LAYERS)(tokens, **{CACHE_ARGUMENT: cache}, **given)


def logits(name: str, cache: Any, tokens: Tensor) -> Tensor:
    found: Tensor = call(name, cache, tokens).logits
    return found


def assert_goes_on(name: str, cache: Any, before: Tensor, tokens: Tensor) -> None:
    """With the logits of `tokens` after those that the cache holds."""
    expected = logits(name, None, torch.cat([before, tokens], dim=1))[:, -tokens.shape[1] :]
    torch.testing.assert_close(logits(name, cache, tokens), expected, rtol=1e-4, atol=1e-4)


def _overlapped(name: str, cache: Any) -> Any:
    return overlapped(deep(name, NUM_LAYERS), cache) if isinstance(cache, MicroBatchedCache) else nullcontext()
