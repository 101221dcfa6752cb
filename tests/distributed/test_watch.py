"""A watch ends the process when nothing is finished for as long as its timeout, never before (pretended streams)."""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from tiers import slow

from fastattention.distributed.transports import watch
from fastattention.distributed.transports.watch import Watch

SECONDS = 1.0  # long beside what a busy machine keeps threads waiting
CPU = torch.device("cpu")


class Enqueued:
    """Writes of a stream, carried out when a test says so."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def write(self, address: int, number: int, stream: int) -> None:
        self.numbers.append(number)


@pytest.fixture
def enqueued() -> Iterator[Enqueued]:
    made = Enqueued()
    with mock.patch.object(watch, "stream_write_value32", made.write):
        yield made


@pytest.fixture
def ended() -> Iterator[threading.Event]:
    """Happens when a watch ends the process."""
    happened = threading.Event()
    with mock.patch.object(os, "abort", happened.set):
        yield happened


@pytest.fixture
def one(enqueued: Enqueued, ended: threading.Event) -> Iterator[Watch]:
    made = Watch("copy_engine", CPU, SECONDS)
    yield made
    made._seconds = math.inf  # before the process can be ended again


def finish(one: Watch, number: int) -> None:
    """As the GPU does."""
    one._finished[0] = number if number < 2**31 else number - 2**32


def test_a_call_that_is_never_finished_ends_the_process(
    one: Watch, enqueued: Enqueued, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    one.finish(0)
    assert not ended.wait(0.5 * SECONDS)
    with caplog.at_level(logging.CRITICAL):
        assert ended.wait(30.0)
    assert enqueued.numbers == [1]
    assert f"copy_engine: a sum over the ranks is not done within the {SECONDS:g} seconds" in caplog.text


@slow
def test_calls_that_are_finished_in_time_may_go_on_for_longer(one: Watch, ended: threading.Event) -> None:
    for number in range(1, 9):
        one.finish(0)
        one.finish(0)
        finish(one, 2 * number - 1)  # always one behind
        assert not ended.wait(SECONDS / 3)
    assert ended.wait(30.0)


@slow
def test_nothing_to_do_is_no_reason_to_end(one: Watch, ended: threading.Event) -> None:
    one.finish(0)
    finish(one, 1)
    assert not ended.wait(3 * SECONDS)
    one.finish(0)
    assert not ended.wait(0.5 * SECONDS)  # counted from now on
    finish(one, 2)
    assert not ended.wait(2 * SECONDS)


def test_numbers_count_in_a_circle(one: Watch, enqueued: Enqueued) -> None:
    one._enqueued = 2**32 - 2
    finish(one, one._enqueued)
    for number in (2**32 - 1, 0, 1):
        one.finish(0)
        assert enqueued.numbers[-1] == number
        assert not one.is_idle
        finish(one, number)
        assert one.is_idle


def test_an_interrupted_call_that_was_enqueued_is_nothing_to_wait_for(one: Watch, enqueued: Enqueued) -> None:
    one.finish(0)
    before = one._enqueued
    one.finish(0)
    one._enqueued = before  # as if interrupted between the stream's write and the count
    finish(one, enqueued.numbers[-1])
    assert one.is_idle
    one.finish(0)
    finish(one, enqueued.numbers[-1])
    assert one.is_idle


def test_the_thread_of_a_watch_that_nobody_has_ends(enqueued: Enqueued, ended: threading.Event) -> None:
    one = Watch("copy_engine", CPU, 60.0)
    one.finish(0)
    thread = one._thread
    assert thread is not None
    del one
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()
    assert not ended.is_set()


def test_a_watch_without_calls_has_no_thread() -> None:
    assert Watch("copy_engine", CPU, SECONDS)._thread is None
