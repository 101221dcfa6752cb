"""A device that is not there: it computes on the CPU at once, and counts the time that a real one would take."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastattention.offload.device import Copy, Device


@dataclass
class Rates:
    """Bytes a second of the link each way and of attention on the CPU, and seconds that handing over to it takes."""

    link: float = 50e9
    cpu: float = 150e9
    hand_over: float = 0.0


class Line(threading.local):
    """The time that the computation of a thread has reached."""

    now = 0.0


@dataclass
class PretendDevice(Device):
    """Everything happens in the order in which it was asked for, which is one of those that a real device may choose.

    Time passes for the computation (`now`, advanced by `compute`), for uploads and downloads, each in its own line; an
    event is a time. Every thread has a line of computation of its own. Uploads are carried out when the computation
    waits for them, as late as can be, so that what happens to their source in between is seen.
    """

    rates: Rates = field(default_factory=Rates)
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self._line = Line()
        self._lock = threading.RLock()  # of copies: threads ask for them at once
        self.branches: list[int] = []
        self.adopted: list[Tensor] = []
        self.uploaded_until = 0.0
        self.downloaded_until = 0.0
        self.uploaded_bytes = self.downloaded_bytes = self.cpu_bytes = 0
        self.pinned: list[Tensor] = []
        self._waiting: list[tuple[float, Sequence[Copy]]] = []

    @property
    def now(self) -> float:
        return self._line.now

    @now.setter
    def now(self, time: float) -> None:
        self._line.now = time

    @contextlib.contextmanager
    def branch(self, number: int) -> Iterator[None]:
        self.branches.append(number)
        before, self.now = self.now, 0.0
        try:
            yield
        finally:
            self.now = before

    def adopt(self, tensor: Tensor) -> None:
        self.adopted.append(tensor)

    def compute(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> float:
        return self.now

    def wait(self, event: float) -> None:
        self.now = max(self.now, event)
        with self._lock:
            while self._waiting and self._waiting[0][0] <= event:
                self._carry_out(self._waiting.pop(0)[1])

    def upload(self, copies: Sequence[Copy], after: Sequence[float]) -> float:
        nbytes = self._nbytes(copies)
        with self._lock:
            self.uploaded_bytes += nbytes
            self.uploaded_until = max([self.uploaded_until, *after]) + nbytes / self.rates.link
            self._waiting.append((self.uploaded_until, copies))
            return self.uploaded_until

    def download(self, copies: Sequence[Copy]) -> float:
        nbytes = self._nbytes(copies)
        with self._lock:
            self.downloaded_bytes += nbytes
            self.downloaded_until = max(self.downloaded_until, self.now) + nbytes / self.rates.link
            self._carry_out(copies)
            return self.downloaded_until

    def run_on_cpu(self, work: Callable[[], None], nbytes: int, after: float) -> None:
        with self._lock:
            self.cpu_bytes += nbytes
        work()
        self.now = max(self.now, after + self.rates.hand_over + nbytes / self.rates.cpu)

    def pin(self, memory: Tensor) -> None:
        assert memory.is_contiguous()
        self.pinned.append(memory)

    def unpin(self, memory: Tensor) -> None:
        (position,) = (index for index, each in enumerate(self.pinned) if each is memory)
        self.pinned.pop(position)

    @staticmethod
    def _nbytes(copies: Sequence[Copy]) -> int:
        return sum(copy.source.nbytes for copy in copies)

    @staticmethod
    def _carry_out(copies: Sequence[Copy]) -> None:
        for target, source in copies:
            assert target.is_contiguous()
            assert source.is_contiguous()
            target.copy_(source)
