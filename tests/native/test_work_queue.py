"""A queue of work begins every job when its number is reached, in order, and signals its end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from .callbacks import Callback
from .queues import Numbers, wait_for

LAST = 2**32 - 1


class Log(Callback):
    """Jobs that write down their arguments."""

    def __init__(self) -> None:
        self.found: list[int] = []
        super().__init__(lambda argument: self.found.append(argument or 0))


@pytest.fixture
def numbers() -> Iterator[Numbers]:
    made = Numbers()
    yield made
    made.queue.end()


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_job_waits_for_its_number(numbers: Numbers, log: Log) -> None:
    numbers.queue.push(1, log.address, 41)
    numbers.queue.push(2, log.address, 42)
    time.sleep(0.05)  # longer than the queue spins
    assert log.found == []
    assert numbers.done == 0
    numbers.reach(1)
    numbers.wait(1)
    time.sleep(0.01)
    assert log.found == [41]
    numbers.reach(2)
    numbers.wait(2)
    assert log.found == [41, 42]


def test_numbers_that_are_reached_before_let_a_job_begin(numbers: Numbers, log: Log) -> None:
    numbers.reach(5)
    for number in (3, 5):  # 4 was never queued
        numbers.queue.push(number, log.address, number)
        assert numbers.queue.newest == number
    numbers.wait(5)
    assert log.found == [3, 5]


def test_jobs_are_done_in_order_and_counted_when_they_are_over(numbers: Numbers) -> None:
    seen = []
    callback = Callback(lambda argument: seen.append((argument, numbers.done)))
    for number in range(1, 101):
        numbers.queue.push(number, callback.address, number)
    for number in range(1, 101, 3):
        numbers.reach(number)
    numbers.wait(100)
    assert seen == [(number, number - 1) for number in range(1, 101)]


def test_numbers_count_in_a_circle(log: Log) -> None:
    numbers = Numbers(LAST - 1)
    numbers.queue.push(LAST, log.address, 1)
    numbers.queue.push(0, log.address, 2)
    numbers.queue.push(1, log.address, 3)
    time.sleep(0.01)
    assert log.found == []
    numbers.reach(0)
    numbers.wait(0)
    assert log.found == [1, 2]
    numbers.reach(1)
    numbers.wait(1)
    assert log.found == [1, 2, 3]
    numbers.queue.end()


def test_the_newest_of_no_jobs_is_0(numbers: Numbers) -> None:
    assert numbers.queue.newest == 0


def test_an_end_drops_what_is_not_ready_and_lets_others_go_on(log: Log) -> None:
    numbers = Numbers()
    for number in (1, 2, 3):
        numbers.queue.push(number, log.address, number)
    numbers.reach(1)
    numbers.wait(1)
    numbers.queue.end()
    assert log.found == [1]
    assert numbers.done == 3  # a GPU that waits for them goes on


def test_an_end_waits_for_the_job_under_way() -> None:
    numbers, found = Numbers(), []

    def work(_: int | None) -> None:
        found.append("begun")
        time.sleep(0.1)
        found.append("over")

    callback = Callback(work)
    numbers.queue.push(1, callback.address, 0)
    numbers.reach(1)
    wait_for(lambda: found != [])
    numbers.queue.end()
    assert found == ["begun", "over"]


def test_a_queue_that_nobody_has_ends() -> None:
    before = threads()
    numbers = Numbers()
    assert threads() == before + 1
    del numbers
    wait_for(lambda: threads() == before)


def threads() -> int:
    """Threads of this process."""
    return len(os.listdir("/proc/self/task"))
