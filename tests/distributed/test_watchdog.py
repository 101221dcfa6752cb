"""A watchdog ends the process when nothing is finished for as long as its timeout, never before."""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from tiers import slow

from distributed.fake_calls import CALLS, sum_on
from distributed.fake_gpus import PATIENCE, Host, Stream
from fastattention.distributed.transports.ring_product import RingProduct
from fastattention.gpu_runtime import watchdog
from fastattention.gpu_runtime.watchdog import Watchdog

SECONDS = 1.0  # long compared with delays of threads on a busy machine
CPU = torch.device("cpu")


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers that a stream is to write, when the test tells it to."""
    numbers: list[int] = []
    monkeypatch.setattr(watchdog, "stream_write_value32", lambda address, number, stream: numbers.append(number))
    return numbers


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """An event that is set when a watchdog ends the process."""
    happened = threading.Event()
    monkeypatch.setattr(os, "abort", happened.set)
    return happened


@pytest.fixture
def one(enqueued: list[int], ended: threading.Event) -> Iterator[Watchdog]:
    made = Watchdog("ring_product", CPU, SECONDS)
    yield made
    made._seconds = math.inf  # before the process can be ended again


def finish(one: Watchdog, number: int) -> None:
    """Finishes a call, as the GPU does."""
    one._finished[0] = number if number < 2**31 else number - 2**32


def test_a_call_that_is_never_finished_ends_the_process(
    one: Watchdog, enqueued: list[int], ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    one.finish(0)
    assert not ended.wait(0.5 * SECONDS)
    with caplog.at_level(logging.CRITICAL):
        assert ended.wait(30.0)
    assert enqueued == [1]
    assert f"ring_product: a sum over the ranks is not done within the {SECONDS:g} seconds" in caplog.text


@slow
def test_calls_that_are_finished_in_time_may_go_on_for_longer(one: Watchdog, ended: threading.Event) -> None:
    for number in range(1, 9):
        one.finish(0)
        one.finish(0)
        finish(one, 2 * number - 1)  # always one call is unfinished
        assert not ended.wait(SECONDS / 3)
    assert ended.wait(30.0)


@slow
def test_nothing_to_do_is_no_reason_to_end(one: Watchdog, ended: threading.Event) -> None:
    for number in (1, 2):
        one.finish(0)
        assert not ended.wait(0.5 * SECONDS)  # the timeout counts from now on
        finish(one, number)
        assert not ended.wait(2.5 * SECONDS)


def test_numbers_count_modulo_2_to_the_32(one: Watchdog, enqueued: list[int]) -> None:
    one._enqueued = 2**32 - 2
    finish(one, one._enqueued)
    for number in (2**32 - 1, 0, 1):
        one.finish(0)
        assert enqueued[-1] == number
        assert not one.is_idle
        finish(one, number)
        assert one.is_idle


def test_an_interrupted_call_that_was_enqueued_is_nothing_to_wait_for(one: Watchdog, enqueued: list[int]) -> None:
    one.finish(0)
    before = one._enqueued
    one.finish(0)
    one._enqueued = before  # as if interrupted between the stream's write and the count
    for _ in range(2):
        finish(one, enqueued[-1])
        assert one.is_idle
        one.finish(0)


def test_a_thread_looks_from_the_first_call_until_nobody_has_the_watchdog(enqueued: list[int]) -> None:
    one = Watchdog("ring_product", CPU, 60.0)
    assert one._thread is None
    one.finish(0)
    thread = one._thread
    assert thread is not None
    del one
    gc.collect()
    thread.join(30.0)
    assert not thread.is_alive()


def test_a_watchdog_is_told_of_every_call_that_is_no_graph_s() -> None:
    """It is told at the end of a call: a number written too early, or by a replay, would end a working process."""
    host, call = Host(1, RingProduct, timeout=77.0), CALLS["even"]

    def task(transport: RingProduct, rank: int, stream: Stream) -> None:
        one = transport._watchdog
        assert one._seconds == 77.0
        for count in (1, 2, 3):
            sum_on(transport, rank, stream, call)
            stream.synchronize()
            assert one.is_idle
            assert one.finished == one._enqueued == count
        happened = threading.Event()
        transport._gathering.enqueue(lambda: happened.wait(PATIENCE))
        sum_on(transport, rank, stream, call)
        time.sleep(0.1)  # time for calls that do not wait
        assert not one.is_idle
        happened.set()
        with host.capture():
            sum_on(transport, rank, stream, call)
        stream.synchronize()
        assert one.finished == one._enqueued == 4

    host.run(task)
