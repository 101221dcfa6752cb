"""How products are told to leave multiprocessors free."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastattention.distributed import products
from fastattention.distributed.products import products_leave_free
from fastattention.distributed.transports import BlockTransport, Room

GPU = torch.device("cuda", 0)


class Cublas:
    """A handle's number of multiprocessors, 0 for all; `user` has set it before."""

    def __init__(self, user: int = 0) -> None:
        self.target = user
        self.told: list[int] = []

    def cublasGetSmCountTarget(self, handle: ctypes.c_void_p, target: Any) -> int:  # noqa: N802
        assert handle.value == 77
        target._obj.value = self.target
        return 0

    def cublasSetSmCountTarget(self, handle: ctypes.c_void_p, target: int | ctypes.c_int) -> int:  # noqa: N802
        assert handle.value == 77
        self.target = target if isinstance(target, int) else target.value
        self.told.append(self.target)
        return 0


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> Cublas:
    library = Cublas()
    monkeypatch.setattr(products, "_cublas", lambda: library)
    monkeypatch.setattr(products, "_num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 77)
    return library


def fail_in_it() -> None:
    with products_leave_free(12, GPU):
        raise MemoryError


@pytest.mark.parametrize("user", [0, 100])
def test_products_have_what_is_left_and_then_what_they_had(cublas: Cublas, user: int) -> None:
    cublas.target = user
    with products_leave_free(8, GPU):
        assert cublas.target == 124
    assert cublas.target == user
    with pytest.raises(MemoryError):
        fail_in_it()
    assert cublas.told[-2:] == [120, user]


def test_nothing_is_told_where_nothing_is_to_be_left(cublas: Cublas) -> None:
    with products_leave_free(0, GPU), products_leave_free(8, torch.device("cpu")):
        assert cublas.told == []


def test_products_do_without_where_cublas_cannot_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_cublas", lambda: None)
    with products_leave_free(8, GPU):
        pass


@pytest.mark.parametrize("version", [None, "99.9"])
def test_cublas_may_be_missing(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    products._cublas.cache_clear()
    assert products._cublas() is None
    products._cublas.cache_clear()


def test_blocks_behind_the_first_leave_the_room_of_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    free: list[int] = []
    monkeypatch.setattr(products, "_cublas", lambda: None)

    def left_free(multiprocessors: int, device: torch.device) -> Any:
        free.append(multiprocessors)
        return products_leave_free(multiprocessors, device)

    monkeypatch.setattr("fastattention.distributed.transports.base.products_leave_free", left_free)
    pending = SimpleNamespace(advance=lambda: None, wait=lambda: None)
    transport: Any = SimpleNamespace(
        rooms=(Room(), Room(8, 6)), begin=lambda out, rows, room: out, all_reduce=lambda *_: pending
    )
    for room in (0, 1):
        BlockTransport.run(transport, lambda *_: None, torch.empty(9, 2), (4, 3, 2), room)
    assert free == [0, 0, 0, 0, 6, 6]
