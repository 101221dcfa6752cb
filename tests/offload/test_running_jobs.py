"""Jobs of the CPU are kept as long as the driver may run them, and their errors are raised."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from fastattention.offload.device import CpuJob, Running


class Work:
    """Work whose end the test controls."""

    function = argument = 0

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def run(self) -> None:
        raise AssertionError("a test runs nothing")

    def check(self) -> None:
        if self._error is not None:
            raise self._error


class End:
    """An event of a GPU."""

    passed = False

    def query(self) -> bool:
        return self.passed


def keep(running: Running, work: Work) -> tuple[Any, weakref.ref[Work]]:
    job = running.keep(CpuJob([], work))
    job.end = End()  # type: ignore[assignment]
    return job.end, weakref.ref(work)


def test_jobs_stay_until_they_have_ended() -> None:
    running = Running()
    (first, first_work), (second, second_work) = (keep(running, Work()) for _ in range(2))
    running.check()
    assert first_work() is not None
    first.passed = True
    running.check()
    assert first_work() is None
    assert second_work() is not None
    second.passed = True
    assert len(running.forget()) == 1
    assert second_work() is None


def test_a_job_whose_asking_was_interrupted_stays() -> None:
    running = Running()
    job = CpuJob([], Work())
    running.keep(job)
    running.check()
    assert running.forget() == []


def test_an_error_is_raised_by_a_later_call() -> None:
    running = Running()
    end, _ = keep(running, Work(MemoryError("no memory")))
    running.check()
    end.passed = True
    with pytest.raises(MemoryError, match="no memory"):
        running.check()
    running.check()
