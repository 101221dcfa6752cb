"""Queues of work, and the counters by which a GPU and they synchronize."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fastattention.backends.cpu.work_queue import WorkQueue


class Numbers:
    """A queue, and the counters by which a GPU and it synchronize."""

    def __init__(self, start: int = 0) -> None:
        self.memory = torch.tensor([start, start], dtype=torch.uint32)
        self.queue = WorkQueue(*self.memory)

    @property
    def done(self) -> int:
        return int(self.memory[1])

    def reach(self, number: int) -> None:
        self.memory[0] = number

    def wait(self, number: int) -> None:
        wait_for(lambda: self.done == number)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(1e-3)
