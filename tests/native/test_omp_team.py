"""The OpenMP team of torch does the work while it is awake, and only then (a fake OpenMP)."""

from __future__ import annotations

import ctypes
import multiprocessing
import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import fastattention
from fastattention import fast_attn_func
from fastattention.backends.cpu import torch_threads
from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.torch_threads import OpenMp, find_openmp

from .callbacks import Callback
from .queues import Numbers

DUE = 0.03  # seconds after which the library checks again whether threads are awake
NOBODY = 1000  # more threads than any machine has at work
FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class FakeOpenMp:
    """A team of Python's threads. When the library asks how many must be at work, it gets `looked_for`: 0 are."""

    def __init__(self, team: int = 2, most: int = 2, looked_for: int = 0, holds_up: float = 0.0) -> None:
        self.teams = 0
        self._holds_up = holds_up  # seconds that the team ends later than the work
        self._team, self._most, self._looked_for, self._asked = team, most, looked_for, 0
        self._parallel = Callback(self._run, arguments=(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint))
        self._max_threads = Callback(self._number, result=ctypes.c_int, arguments=())

    def install(self) -> None:
        load_library().set_omp_team(OpenMp(self._parallel.address, self._max_threads.address))
        time.sleep(DUE)

    def _number(self) -> int:
        self._asked += 1
        return self._looked_for if self._asked == 1 else self._most

    def _run(self, function: int, data: int, num_threads: int, flags: int) -> None:
        assert (num_threads, flags) == (0, 0)
        self.teams += 1
        helpers = [threading.Thread(target=FUNCTION(function), args=(data,)) for _ in range(self._team - 1)]
        for helper in helpers:
            helper.start()
        FUNCTION(function)(data)
        for helper in helpers:
            helper.join()
        time.sleep(self._holds_up)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    fastattention.set_num_threads(2)
    yield
    fastattention.set_num_threads(None)
    load_library().set_omp_team(find_openmp())


def attend_and_check() -> None:
    """Asserts that the bits are those of one thread, whoever computes."""
    q, (k, v) = torch.randn(2, 97, 6, 40), torch.randn(2, 2, 211, 3, 40)
    found = fast_attn_func(q, k, v, causal=True, backend="cpu")
    fastattention.set_num_threads(1)
    expected = fast_attn_func(q, k, v, causal=True, backend="cpu")
    fastattention.set_num_threads(2)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("team", [1, 2, 5])
def test_a_team_that_is_awake_does_the_work(team: int) -> None:
    """The team may have any size: within a parallel region it is only the caller."""
    openmp = FakeOpenMp(team)
    openmp.install()
    attend_and_check()
    assert openmp.teams > 0


@pytest.mark.parametrize("fake", [{"looked_for": NOBODY}, {"most": 1}], ids=["asleep", "fewer"])
def test_threads_that_sleep_or_are_fewer_than_wanted_are_left_alone(fake: dict[str, int]) -> None:
    openmp = FakeOpenMp(**fake)
    openmp.install()
    attend_and_check()
    assert openmp.teams == 0


def test_what_was_found_holds_for_a_while_and_is_looked_at_again() -> None:
    openmp = FakeOpenMp()
    openmp.install()
    attend_and_check()
    before, openmp._asked, openmp._looked_for = openmp.teams, 0, NOBODY
    time.sleep(DUE)
    attend_and_check()
    assert openmp.teams == before


def test_a_team_that_is_held_up_rests() -> None:
    openmp = FakeOpenMp(holds_up=0.005)
    openmp.install()
    for _ in range(2):  # the second while what was found of the team still holds
        attend_and_check()
    assert openmp.teams == 1


def _attend_in_child(openmp: FakeOpenMp) -> None:
    torch.set_num_threads(1)  # torch's own pool does not survive a fork
    time.sleep(DUE)
    attend_and_check()
    assert openmp.teams == 0


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_none() -> None:
    openmp = FakeOpenMp()
    openmp.install()
    child = multiprocessing.get_context("fork").Process(target=_attend_in_child, args=(openmp,), daemon=True)
    child.start()
    try:
        child.join(60.0)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()


def test_the_thread_of_a_work_queue_does_without() -> None:
    """For it OpenMP would start another team of threads."""
    openmp = FakeOpenMp()
    openmp.install()
    numbers = Numbers()
    data = torch.ones(64 << 20, dtype=torch.uint8)
    job = Callback(lambda argument: load_library().read_loop(data, 2))
    numbers.queue.push(1, job.address, 0)
    numbers.reach(1)
    numbers.wait(1)
    numbers.queue.end()
    assert openmp.teams == 0
    assert openmp._asked == 1  # the library checked, and found it awake


def test_that_of_torch_is_found_where_torch_has_one() -> None:
    found = find_openmp()
    assert all(found) == ("ATen parallel backend: OpenMP" in torch.__config__.parallel_info())
    with mock.patch.object(torch.__config__, "parallel_info", return_value="ATen parallel backend: native thread pool"):
        assert find_openmp() == OpenMp()
    with mock.patch.object(torch_threads, "_TORCH_LIBRARY", "libmissing.so"):
        assert find_openmp() == OpenMp()
