"""Budgets are kept, and steps that do not fit are refused before anything is lost."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from tiers import sampled, slow

from fastattention.errors import CacheFullError
from fastattention.offload.kv_store import CooperativeKVStore, MemoryCaps
from fastattention.offload.layer import AttendOptions
from offload.fake_device import FakeDevice
from offload.reference_cache import HEADDIM, HEADDIM_V, NHEADS_K, CachePair, page_shape

pytestmark = pytest.mark.usefixtures("small_buffers")


def make_pair(gpu_pages: int, cpu_pages: int = 1000, num_layers: int = 4, batch_size: int = 1) -> CachePair:
    return CachePair(num_layers, batch_size, gpu_pages=gpu_pages, cpu_pages=cpu_pages, share=lambda layers, tokens: 0.4)


def fill(pair: CachePair, tokens: int = 1) -> CacheFullError:
    """Runs steps until there is no room; the comparison checks that nothing was lost."""
    for _ in range(500):
        try:
            pair.attend(tokens)
        except CacheFullError as error:
            return error
    raise AssertionError("never full")


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_cpu_memory_that_is_full_is_named(tokens: int) -> None:
    pair = make_pair(25, cpu_pages=50)
    error = fill(pair, tokens)
    assert "cpu_memory" in str(error)
    assert pair.store.usage.cpu_bytes > 40 * pair.shape.nbytes
    pair.check()
    length = pair.length
    with pytest.raises(CacheFullError, match="cpu_memory"):
        pair.attend(tokens)
    pair.truncate(length - 9)
    pair.steps(9)


def test_a_prompt_that_the_device_cannot_take_at_once_is_refused_and_taken_in_chunks() -> None:
    pair = make_pair(25)
    pair.attend(10)
    for _ in range(2):
        with pytest.raises(CacheFullError, match=r"gpu_memory.*smaller chunks"):
            pair.attend(90)
        pair.check()
    pair.attend(40)
    pair.attend(50)


def test_no_layer_can_leave_without_cpu_memory() -> None:
    pair = make_pair(25, cpu_pages=0)
    error = fill(pair)
    assert "cpu_memory" in str(error)
    assert not any(pair.store.layers_on_cpu)
    assert pair.store.usage.gpu_bytes > 0.7 * pair.budget.gpu
    pair.truncate(3)
    pair.steps(5)


@sampled
@pytest.mark.parametrize("gpu_pages", range(8, 40, 2))
def test_a_step_that_begins_has_room_to_its_end(gpu_pages: int) -> None:
    """This holds for any budget; layers in CPU memory may come before those on the device and after them."""
    pair = make_pair(gpu_pages, num_layers=5 if gpu_pages > 9 else 4)
    for tokens in (7, 5, 3, 6, 5, 1, 9, 1, 5, 5, 5, 2, 5, 4, 5, 5):
        with suppress(CacheFullError):
            pair.attend(tokens)
        with suppress(CacheFullError):
            pair.append(2 * tokens)
    assert any(pair.store.layers_on_cpu)


@slow
@sampled
@pytest.mark.parametrize("more", range(10))
def test_beams_that_shared_their_pages_have_room_for_their_own(more: int) -> None:
    pair = make_pair(8 * 3 + 6 + more, num_layers=6, batch_size=3)
    for _ in range(8):
        with suppress(CacheFullError):
            pair.attend(5)
        pair.select([0, 0, 0])
        for _ in range(3):
            with suppress(CacheFullError):
                pair.attend(1)
        pair.select([1, 0, 1])
    assert any(pair.store.layers_on_cpu)


@pytest.mark.parametrize("tokens", range(8, 44, 4))
def test_a_layer_that_leaves_frees_a_shared_page_once(tokens: int) -> None:
    pair = make_pair(115, num_layers=3, batch_size=3)
    pair.append(40)
    pair.select([0, 0, 0])
    assert not any(pair.store.layers_on_cpu)
    with suppress(CacheFullError):
        pair.attend(tokens)
        pair.attend(1)


@pytest.mark.parametrize("gpu_pages", range(50, 80, 2))
def test_copies_of_shared_pages_have_room(gpu_pages: int) -> None:
    pair = make_pair(gpu_pages, cpu_pages=0, num_layers=3, batch_size=3)
    pair.append(5)
    pair.select([0, 0, 0])
    with suppress(CacheFullError):
        pair.attend(21)


@pytest.mark.parametrize("gpu_pages", range(110, 150, 3))
def test_there_is_room_to_forget_when_there_are_more_sequences(gpu_pages: int) -> None:
    pair = make_pair(gpu_pages, num_layers=12)
    pair.append(100)
    assert sum(pair.store.layers_on_cpu) > 4
    with suppress(CacheFullError):
        pair.select([0] * 5)
    pair.truncate(99)


@pytest.mark.parametrize("gpu_pages", range(10, 30, 2))
def test_there_is_always_room_to_forget(gpu_pages: int) -> None:
    """A length that ends inside a page needs that page on the device again, in every layer."""
    pair = make_pair(gpu_pages, num_layers=6)
    pair.append(60)
    for length in (59, 57, 53, 50, 46):
        pair.truncate(length)
        with suppress(CacheFullError):
            pair.append((-length) % 4)
            pair.append(12)
        pair.truncate(length)


@pytest.mark.parametrize("gpu_pages", range(10, 30, 2))
def test_there_is_always_room_to_undo_a_step(gpu_pages: int) -> None:
    pair = make_pair(gpu_pages, num_layers=6)
    pair.append(50)
    for at in range(0, 80, 5):
        pair.device.faults.arm(at, KeyboardInterrupt())
        with suppress(KeyboardInterrupt, CacheFullError):
            pair.append(6)
        pair.device.faults.disarm()
        pair.truncate(50)


def test_sequences_that_there_is_no_room_for_are_refused() -> None:
    """Buffers are divided again, never enlarged, and every layer must keep a page of each sequence on the device."""
    pair = make_pair(40, batch_size=2)
    for rows in ([0] * 3, [0] * 9):
        pair.append(5)
        with suppress(CacheFullError):
            pair.select(rows)
        pair.check()
    pair.append(70)
    assert any(pair.store.layers_on_cpu)
    with pytest.raises(CacheFullError, match="gpu_memory"):
        pair.select([0] * 40)
    pair.check()
    pair.steps(3)


def test_a_store_that_nobody_has_gives_its_memory_back_at_once() -> None:
    """It must not wait for Python's cycle collector, because memory of the device is scarce."""
    gc.disable()
    try:
        device = FakeDevice()
        store = CooperativeKVStore(1, 1, page_shape(), device, MemoryCaps(6000, 6000), lambda layers, tokens: 0.5)
        q, k, v = (
            torch.zeros(1, 12, *heads) for heads in ((NHEADS_K, HEADDIM), (NHEADS_K, HEADDIM), (NHEADS_K, HEADDIM_V))
        )
        while not any(store.layers_on_cpu):
            store.append(0, k, v)
        store.attend(0, q[:, :1], k[:, :1], v[:, :1], AttendOptions())
        assert device.pinned
        gone = weakref.ref(store)
        del store
        assert gone() is None
        assert not device.pinned
    finally:
        gc.enable()


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_memory_is_within_the_budgets_to_the_byte(batch_size: int, cache_dtype: torch.dtype | None) -> None:
    """CachePair checks that after every step. This test also checks that the budgets are used."""
    shape = page_shape(torch.bfloat16, cache_dtype)
    pair = CachePair(3, batch_size, shape, 20 * batch_size, 60, device=FakeDevice())
    fill(pair)
    usage = pair.store.usage
    assert usage.gpu_bytes <= pair.budget.gpu
    assert 0.8 * pair.budget.cpu < usage.cpu_bytes <= pair.budget.cpu
    assert usage.num_layers_gpu + usage.num_layers_cpu == 3
