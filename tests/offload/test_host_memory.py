"""Host memory is pinned as it is used, in slabs that devices may copy from, and freed."""

from __future__ import annotations

import gc
import mmap

import pytest
import torch

from fastattention.errors import CacheFullError
from fastattention.offload import host_memory
from fastattention.offload.host_memory import HostMemory
from fastattention.offload.pages import PagePool, Pages, PageShape, allocate_pages
from offload.fake_device import FakeDevice

SHAPES = [
    PageShape(16, 8, 128, 128, torch.bfloat16),
    PageShape(16, 8, 128, 64, torch.bfloat16, torch.int8),
    PageShape(1, 3, 13, 7, torch.float32),
    PageShape(4, 2, 16, 8, torch.float32, torch.float8_e4m3fn),
]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["large", "int8", "odd", "float8"])


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "SLAB", 3 << 16)


def made(shape: PageShape, slabs: float = 3.5) -> tuple[FakeDevice, HostMemory, Pages]:
    device = FakeDevice()
    memory = HostMemory(shape, device)
    return device, memory, allocate_pages(shape, int(slabs * memory.slab_pages), memory.allocate)


def spans(device: FakeDevice) -> list[tuple[int, int]]:
    return sorted((slab.data_ptr(), slab.data_ptr() + slab.nbytes) for slab in device.pinned)


@every_shape
def test_nothing_is_pinned_before_it_is_used_and_then_by_slabs(shape: PageShape) -> None:
    device, memory, pages = made(shape)
    count = len(list(pages.tensors()))
    assert device.pinned == []
    memory.use(0)
    assert device.pinned == []
    memory.use(1)
    memory.use(memory.slab_pages)
    assert len(device.pinned) == count
    largest = max(slab.nbytes for slab in device.pinned)
    assert host_memory.SLAB // 3 < largest <= max(host_memory.SLAB, mmap.PAGESIZE * 64)
    for used in (memory.slab_pages + 1, 3):
        memory.use(used)
        assert len(device.pinned) == 2 * count


@every_shape
def test_slabs_share_no_page_of_the_system_and_cover_all(shape: PageShape) -> None:
    device, memory, pages = made(shape)
    num_pages = pages.k.shape[0]
    memory.use(num_pages)
    systems = [set(range(begin // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))) for begin, end in spans(device)]
    assert sum(len(one) for one in systems) == len(set.union(*systems))
    assert all(begin % mmap.PAGESIZE == 0 for begin, _ in spans(device))
    assert sum(slab.nbytes for slab in device.pinned) == num_pages * shape.nbytes
    for tensor in pages.tensors():
        tensor.view(torch.uint8).fill_(1)  # all of it can be written


def test_what_is_copied_in_one_piece_lies_within_a_slab() -> None:
    """Copies are the runs of a pool of these pages."""
    shape = SHAPES[3]
    device = FakeDevice()
    memory = HostMemory(shape, device)
    pool = PagePool(
        shape, 3 * memory.slab_pages, memory.allocate, name="CPU memory", remedy="", wait=device.wait,
        use=memory.use, slab_pages=memory.slab_pages,
    )  # fmt: skip
    pool.take(3 * memory.slab_pages)
    for tensor in pool.pages.tensors():
        for first in range(0, pool.num_pages, pool.slab_pages):
            run = tensor[first : first + pool.slab_pages]
            begin, end = run.data_ptr(), run.data_ptr() + run.nbytes
            assert any(low <= begin and end <= high for low, high in spans(device))


@every_shape
def test_what_cannot_be_pinned_is_refused_whole_and_may_be_tried_again(shape: PageShape) -> None:
    device, memory, pages = made(shape)
    memory.use(1)
    before = spans(device)
    bytes_of_a_slab = sum(slab.nbytes for slab in device.pinned)
    device.most_pinned = 2 * bytes_of_a_slab - 1  # the last tensor of the second slab does not fit
    for _ in range(2):
        with pytest.raises(CacheFullError, match="cpu_memory"):
            memory.use(memory.slab_pages + 1)
        assert spans(device) == before
    device.most_pinned = None
    memory.use(memory.slab_pages + 1)
    assert len(device.pinned) == 2 * len(list(pages.tensors()))


def test_address_space_that_the_system_refuses_is_a_full_cache() -> None:
    memory = HostMemory(SHAPES[0], FakeDevice())
    with pytest.raises(CacheFullError, match=r"address space.*cpu_memory"):
        memory.allocate((1 << 40, 1 << 20), torch.float32)


def test_all_is_unpinned_when_nobody_has_it() -> None:
    device, memory, pages = made(SHAPES[0])
    memory.use(3 * memory.slab_pages)
    assert len(device.pinned) == 6
    gc.disable()
    try:
        del memory
        assert device.pinned == []
    finally:
        gc.enable()
    del pages


def test_no_pages_take_no_memory() -> None:
    device, memory, pages = made(SHAPES[0], slabs=0.0)
    memory.use(0)
    assert pages.k.shape[0] == 0
    assert device.pinned == []
