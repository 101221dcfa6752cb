"""Shared by tests of caches within a budget: tiny models, and a machine slow enough for them to be offloaded."""

from __future__ import annotations

from typing import Any

from offload.fake_device import FakeDevice

from fastattention.offload.hardware import Hardware

from .models import padding_mask, prompts

NUM_LAYERS = 6
PAGE_SIZE = 4
LENGTH = 24
POLICIES = ("classical", "cooperative", "hybrid", "auto")
LARGE = 10_000_000  # bytes: everything fits
# The CPU is so slow that even these tiny layers are divided: a third of them is uploaded.
SLOW = Hardware(
    "slow",
    gpu_bandwidth=1e15,
    link_bandwidth=1e6,
    cpu_bandwidth=2e6,
    dram_bandwidth=3e6,
    handover_seconds=0.0,
    layer_overhead_seconds=0.0,
)


def cache_arguments(kv_budget: int, device: FakeDevice | None, changed: dict[str, Any]) -> dict[str, Any]:
    given = {"kv_budget": kv_budget, "cpu_memory": LARGE, "hardware": SLOW, "page_size": PAGE_SIZE}
    return given | {"device": device or FakeDevice()} | changed


def generate_arguments(max_new_tokens: int, changed: dict[str, Any]) -> dict[str, Any]:
    """Three sequences with padding on the left."""
    given = {"inputs": prompts(length=LENGTH), "attention_mask": padding_mask("left", length=LENGTH)}
    return given | {"max_new_tokens": max_new_tokens, "do_sample": False} | changed
