"""The store takes the memory and the time that the planner predicts, on a fake device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiers import sampled

from fastattention.errors import CacheFullError
from fastattention.offload import memory
from fastattention.offload.hardware import Hardware
from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions
from fastattention.offload.memory import Budget, OffloadWorkload, divide, longest_seqlen, memory_of
from fastattention.offload.model_shape import ModelShape
from fastattention.offload.pages import PageShape
from fastattention.offload.policy import Policy
from fastattention.offload.prediction import seconds_per_token, upload_fraction

from .fake_device import FakeDevice, Rates

MODEL = ModelShape("tiny", 6, 2, 1, 16, 32, 32, 32, dtype_bytes=4)
PAGE_SIZE, CHUNK = 8, 48
FIXED = MODEL.weight_bytes  # bytes of the budget that the cache does not get, without workspace


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chunks and buffers a few pages long."""
    monkeypatch.setattr(memory, "PREFILL_CHUNK", CHUNK)
    monkeypatch.setattr(memory, "STAGING_TOKENS", 64)


def workload_of(batch_size: int, seqlen: int, quantized: bool = False) -> OffloadWorkload:
    return OffloadWorkload(MODEL, batch_size, seqlen, quantized, PAGE_SIZE)


def make_store(
    workload: OffloadWorkload, caps: MemoryCaps, device: FakeDevice | None = None, share: float = 0.0
) -> CooperativeKVStore:
    cache_dtype = torch.int8 if workload.quantized else None
    shape = PageShape(PAGE_SIZE, MODEL.nheads_k, MODEL.headdim, MODEL.headdim_v, torch.float32, cache_dtype)
    device = device or FakeDevice()
    return CooperativeKVStore(MODEL.num_layers, workload.batch_size, shape, device, caps, lambda layers, tokens: share)


def step(store: CooperativeKVStore, tokens: int) -> Iterator[int]:
    """A pass through the model, layer by layer."""
    q = torch.zeros(store.batch_size, tokens, MODEL.nheads, MODEL.headdim)
    k = torch.zeros(store.batch_size, tokens, MODEL.nheads_k, MODEL.headdim)
    for layer in range(MODEL.num_layers):
        store.attend(layer, q, k, k, AttendOptions())
        yield layer


def fill(store: CooperativeKVStore, seqlen: int) -> None:
    """Appends a prompt in chunks, the last of them full, which takes the most memory."""
    chunk = CHUNK // store.batch_size
    while (left := seqlen - store.length) > 0:
        list(step(store, left % chunk or chunk))


@sampled
@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("pages", [70, 100, 150])
def test_the_store_keeps_as_many_layers_on_the_cpu_as_planned(pages: int, batch_size: int, quantized: bool) -> None:
    cache_bytes = pages * workload_of(batch_size, 1).gpu_page_bytes
    budget = Budget(FIXED + cache_bytes, workspace=0)
    seen = set()
    for seqlen in range(2 * CHUNK + 3, 9 * CHUNK, 2 * CHUNK):  # pages are not full at the end
        workload = workload_of(batch_size, seqlen, quantized)
        store = make_store(workload, MemoryCaps(cache_bytes, 1 << 24))
        fill(store, seqlen)
        planned = divide(workload, Policy.HYBRID, budget)
        predicted = memory_of(workload, planned, budget)
        assert store.usage.num_layers_cpu == planned
        assert store.usage.cpu_bytes == predicted.cpu_kv
        assert store.usage.gpu_bytes <= predicted.gpu - FIXED <= cache_bytes
        seen.add(planned)
    assert len(seen) > 1


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("cpu_pages", [0, 40, 75])
def test_the_store_holds_the_longest_sequence_and_not_a_page_more(batch_size: int, cpu_pages: int) -> None:
    one = workload_of(batch_size, 1)
    cache_bytes, cpu_bytes = 70 * one.gpu_page_bytes, cpu_pages * one.cpu_page_bytes
    longest = longest_seqlen(one, Policy.HYBRID, Budget(FIXED + cache_bytes, cpu_bytes, workspace=0))
    assert longest is not None
    store = make_store(one, MemoryCaps(cache_bytes, cpu_bytes))
    fill(store, longest)
    with pytest.raises(CacheFullError):
        fill(make_store(one, MemoryCaps(cache_bytes, cpu_bytes)), longest + PAGE_SIZE)


def test_the_store_has_the_buffers_of_the_plan() -> None:
    for batch_size in (1, 2, 3, 9):
        for pages in (20, 50, 1000):
            workload = workload_of(batch_size, 1, quantized=True)
            cache_bytes = pages * workload.gpu_page_bytes
            empty = make_store(workload, MemoryCaps(cache_bytes, 0)).usage.gpu_bytes
            assert empty == workload.staging_bytes(cache_bytes)


@pytest.mark.parametrize("policy", [Policy.CLASSICAL, Policy.HYBRID])
@pytest.mark.parametrize("layer_seconds", [2e-5, 1e-4, 2e-4])
def test_a_step_takes_what_is_predicted_also_when_uploads_wait_for_room(policy: Policy, layer_seconds: float) -> None:
    # The link takes 0.5 ms for a layer on the CPU, and 0.13 ms to fill both buffers, once before each of two layers.
    rates = Rates(link=128e6, cpu=256e6)
    hardware = Hardware("fake", 1e30, rates.link, rates.cpu, 1e12, 0.0, layer_seconds)
    workload = workload_of(1, 512)
    cache_bytes = memory_of(workload, 2, Budget(0, workspace=0)).gpu - FIXED + workload.staging_bytes(1 << 30)
    staging = workload.staging_bytes(cache_bytes)
    device = FakeDevice(rates)
    share = upload_fraction(policy, workload, hardware, 2, staging)
    store = make_store(workload, MemoryCaps(cache_bytes, 1 << 24), device, share)
    fill(store, workload.seqlen)
    assert store.usage.num_layers_cpu == 2
    times = []
    for _ in range(6):
        begin = device.now
        for _ in step(store, 1):
            device.compute(layer_seconds)
        times.append(device.now - begin)
    predicted = seconds_per_token(policy, workload, hardware, 2, staging)
    assert sum(times[2:]) / 4 == pytest.approx(predicted, rel=0.05)
