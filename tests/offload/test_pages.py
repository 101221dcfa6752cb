"""Pages are handed out once, shared, and written again only when they are no longer read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastattention.errors import CacheFullError
from fastattention.offload.pages import PagePool, PageShape, allocate_pages, runs
from fastattention.quantized import quantize

SHAPE = PageShape(page_size=8, nheads_k=3, headdim=16, headdim_v=5, dtype=torch.bfloat16)


def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


class Waits:
    """Records events that were waited for, in order; a wait may be interrupted."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.error: BaseException | None = None

    def __call__(self, event: Any) -> None:
        if self.error is not None:
            raise self.error
        self.events.append(event)


def pool(num_pages: int = 10, wait: Callable[[Any], None] | None = None, **options: Any) -> PagePool:
    return PagePool(SHAPE, num_pages, empty, name="this memory", remedy="buy more", wait=wait or Waits(), **options)


@pytest.mark.parametrize("num_pages", [0, 10])
def test_no_page_is_given_twice_and_no_more_than_there_are(num_pages: int) -> None:
    pages = pool(num_pages)
    taken = pages.take(num_pages // 3) + pages.take(0) + pages.take(num_pages - num_pages // 3)
    assert sorted(taken) == list(range(num_pages))
    assert (pages.available, pages.used) == (0, num_pages)
    with pytest.raises(CacheFullError):
        pages.take(1)
    assert pages.take(0) == []


def test_a_refusal_names_the_memory_the_sizes_and_the_remedy_and_takes_nothing() -> None:
    pages = pool()
    pages.take(4)
    with pytest.raises(CacheFullError, match=r"this memory has 6 free pages of 10 \(8 tokens and 1008 bytes each\), "
                       r"and 7 are needed; buy more"):  # fmt: skip
        pages.take(7)
    assert pages.available == 6
    pages.check(6)
    assert len(pages.take(6)) == 6


def test_the_lowest_pages_are_given_first_so_that_neighbours_lie_together() -> None:
    pages = pool()
    assert pages.take(6) == [0, 1, 2, 3, 4, 5]
    assert pages.take(2) == [6, 7]
    pages.release([7, 6], None)
    pages.release([4, 1, 3], None)
    assert pages.take(5) == [1, 3, 4, 6, 7]


def test_a_page_is_written_again_only_after_what_reads_it() -> None:
    waits = Waits()
    pages = pool(wait=waits)
    taken = pages.take(10)
    pages.release(taken[:4], "first")
    pages.release(taken[4:6], None)
    pages.release(taken[6:], "second")
    assert pages.take(2) == [0, 1]
    assert waits.events == ["first"]
    assert sorted(pages.take(3)) == [2, 3, 4]
    assert waits.events == ["first"]
    assert len(pages.take(5)) == 5
    assert waits.events == ["first", "second"]


def test_pages_that_were_never_used_are_taken_without_waiting() -> None:
    waits = Waits()
    pages = pool(wait=waits)
    pages.release(pages.take(4), "reads")
    assert pages.take(6) == [4, 5, 6, 7, 8, 9]
    assert waits.events == []


def test_a_shared_page_is_free_when_its_last_owner_releases_it() -> None:
    pages = pool(3)
    first, second = pages.take(2)
    pages.share([first])
    pages.share([first])
    pages.release([first, second], None)
    assert (pages.available, pages.used) == (2, 1)
    pages.release([first], None)
    assert pages.available == 2
    pages.release([first], "last")
    assert pages.available == 3


def test_pages_that_cannot_be_used_are_not_taken() -> None:
    used: list[int] = []

    def use(count: int) -> None:
        if count > 5:
            raise CacheFullError("no more")
        used.append(count)

    pages = pool(use=use)
    assert pages.take(3) == [0, 1, 2]
    with pytest.raises(CacheFullError, match="no more"):
        pages.take(3)
    assert pages.available == 7
    assert pages.take(2) == [3, 4]
    assert used == [3, 5]
    with pytest.raises(CacheFullError, match="no more"):
        pages.take(5)
    assert (pages.available, pages.used) == (5, 5)


def test_an_interrupted_wait_loses_no_page() -> None:
    waits = Waits()
    pages = pool(wait=waits)
    pages.release(pages.take(10), "reads")
    waits.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pages.take(4)
    waits.error = None
    assert pages.available == 10
    assert len(pages.take(10)) == 10
    assert waits.events == ["reads"]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9), st.booleans()), max_size=40))
def test_whatever_is_taken_shared_and_released_every_page_has_its_owners(actions: list[tuple[int, int, bool]]) -> None:
    pages = pool(12)
    owned: list[list[int]] = []
    for count, where, shares in actions:
        if shares and owned:
            owned.append(owned[where % len(owned)])
            pages.share(owned[-1])
        elif where % 2 and owned:
            pages.release(owned.pop(where % len(owned)), where)
        elif count <= pages.available:
            taken = pages.take(count)
            assert not set(taken) & {page for one in owned for page in one}
            owned.append(taken)
        assert pages.used == len({page for one in owned for page in one})


# Pages drawn one by one are seldom neighbours.
NEIGHBOURS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=4).map(
    lambda runs: [page for first, count in runs for page in range(first, first + count)]
)


@settings(deadline=None, derandomize=True)
@given(NEIGHBOURS, st.integers(1, 9))
def test_runs_join_neighbours_within_a_slab(pages: list[int], slab_pages: int) -> None:
    found = list(runs(pages, slab_pages))
    assert [page for _, first, count in found for page in range(first, first + count)] == pages
    assert [position for position, _, _ in found] == [
        sum(count for _, _, count in found[:index]) for index in range(len(found))
    ]
    for _, first, count in found:
        assert first // slab_pages == (first + count - 1) // slab_pages
    for (_, first, count), (_, following, _) in pairwise(found):
        assert following != first + count or following % slab_pages == 0, "two runs could be one"


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_a_page_is_as_large_as_its_tensors(cache_dtype: torch.dtype | None) -> None:
    shape = PageShape(8, 3, 16, 5, torch.bfloat16, cache_dtype)
    pages = allocate_pages(shape, 7, empty)
    assert sum(tensor.nbytes for tensor in pages.tensors()) == 7 * shape.nbytes
    assert shape.nbytes == 8 * shape.token_bytes
    elements = 3 * (16 + 5)
    assert shape.token_bytes == (2 * elements if cache_dtype is None else elements + 2 * 3 * 4)


def test_heads_of_a_page_lie_together() -> None:
    """Tensors have the axes of fast_attn_with_kvcache, and memory is heads first."""
    pages = allocate_pages(SHAPE, 7, empty)
    assert pages.k.shape == (7, 8, 3, 16)
    assert pages.v.shape == (7, 8, 3, 5)
    assert (pages.k_scale, pages.v_scale) == (None, None)
    quantized = PageShape(8, 3, 16, 5, torch.bfloat16, torch.int8)
    scaled = allocate_pages(quantized, 7, empty)
    stored, scale = quantize(torch.randn(7, 8, 3, 16), torch.int8)
    assert scaled.k.shape == stored.shape
    assert scaled.k_scale is not None
    assert scaled.k_scale.shape == scale.shape
    assert len(list(pages.tensors())) == 2
    assert all(tensor.is_contiguous() for tensor in (*pages.tensors(), *scaled.tensors()))
