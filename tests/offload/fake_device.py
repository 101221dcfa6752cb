"""A fake device: computes on the CPU at once, copies as late as possible, and simulates a clock.

It notices what would be a race on a real device: unordered copies that access the same memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastattention.errors import CacheFullError
from fastattention.offload.device import Copy, CpuJob, Device, Shared, Span, Upload


@dataclass
class Rates:
    """Bytes a second of the link each way and of attention on the CPU, and seconds that handing over to it takes."""

    link: float = 50e9
    cpu: float = 150e9
    handover: float = 0.0


@dataclass(eq=False)
class Transfer:
    """Copies of one queue that have not been waited for yet; earlier ones of the queue come first."""

    line: deque[Transfer]
    copies: Sequence[Copy]
    after: Sequence[Point]
    sources: list[Tensor] | None = None  # their values when the copies were enqueued, if these must not change
    abandoned: bool = False  # its event was lost, so no code can rely on its copies


@dataclass(eq=False)
class Point:
    """An event: a time, and the transfers that are complete by then."""

    time: float
    transfer: Transfer | None = None


class Faults:
    """Raises an error in a later call, number `at` counted from 0; `late`: after its work is done."""

    def __init__(self) -> None:
        self.fired = False
        self._left: int | None = None

    def arm(self, at: int, error: BaseException, late: bool = False) -> None:
        self._left, self._error, self._late, self.fired = at, error, late, False

    def disarm(self) -> None:
        self._left = None

    def call(self, method: Callable[..., Any], *args: Any, lose: bool = True) -> Any:
        """lose: whether the call may fail after its work is done, so that its result is lost."""
        fails = self._left == 0
        self._left = None if self._left is None or fails else self._left - 1
        self.fired |= fails
        if fails and not (self._late and lose):
            raise self._error
        result = method(*args)
        if fails:
            raise self._error
        return result


def may_fail(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a device that Faults count."""

    @functools.wraps(method)
    def call(self: FakeDevice, *args: Any) -> Any:
        known = {*self._up, *self._down}
        try:
            return self.faults.call(functools.partial(method, self), *args)
        except BaseException:
            for transfer in {*self._up, *self._down} - known:
                transfer.abandoned = True
            raise

    return call


def alone(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a device that one thread at a time may be in."""

    @functools.wraps(method)
    def call(self: FakeDevice, *args: Any) -> Any:
        with self._lock:
            return method(self, *args)

    return call


class Line(threading.local):
    """The time that the computation of a thread has reached."""

    now = 0.0


@dataclass
class FakeDevice(Device):
    """Computes in the order of calls, which is one that a real device may choose.

    Time passes for the computation (`now`, advanced by `compute`), for uploads, downloads and work on the CPU, each in
    a queue of its own. The host takes no time. Copies are carried out as late as possible, when they are waited for. So
    changes of their source, and reads of their target, in between are noticed. Results of the CPU are written late too.
    Every thread has a queue of computation of its own.
    """

    rates: Rates = field(default_factory=Rates)
    torch_device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    most_pinned: int | None = None  # bytes

    def __post_init__(self) -> None:
        self._line = Line()
        self._lock = threading.RLock()  # for copies, which threads enqueue concurrently
        self.branches: list[int] = []
        self.adopted: list[Tensor] = []
        self.uploaded_until = self.downloaded_until = self.cpu_until = 0.0
        self.uploaded_bytes = self.downloaded_bytes = self.cpu_bytes = 0
        self.pinned: list[Tensor] = []
        self.faults = Faults()
        self._shared: list[Tensor] = []
        self._up: deque[Transfer] = deque()
        self._down: deque[Transfer] = deque()
        self._results: deque[Transfer] = deque()
        self._reads: list[tuple[Tensor, float]] = []

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

    def compute(self, seconds: float, reads: Iterable[Tensor] = ()) -> None:
        """Advances the computation by `seconds`, in which it reads tensors."""
        self.now += seconds
        self._reads += [(tensor, self.now) for tensor in reads]

    def finish(self) -> None:
        """Carries out all enqueued transfers."""
        for line in (self._down, self._up, self._results):
            if line:
                self._carry_out(line[-1])

    @may_fail
    def mark(self) -> Point:
        return Point(self.now)

    @may_fail
    @alone
    def wait(self, event: Point) -> None:
        self._reach(event)
        self.now = max(self.now, event.time)

    @may_fail
    def seconds_between(self, begin: Point, end: Point) -> float | None:
        return end.time - begin.time if max(begin.time, end.time) <= self.now else None

    @may_fail
    @alone
    def upload(self, copies: Sequence[Copy], after: Sequence[Point]) -> Upload:
        nbytes = self._nbytes(copies)
        begin = max([self.uploaded_until, *(event.time for event in after)])
        self._check_upload(copies, after, begin)
        self.uploaded_bytes += nbytes
        before = Point(self.uploaded_until)
        self.uploaded_until = begin + nbytes / self.rates.link
        self._up.append(Transfer(self._up, copies, after))
        return Upload(before, Point(begin), Point(self.uploaded_until, self._up[-1]))

    @may_fail
    @alone
    def download(self, copies: Sequence[Copy]) -> Point:
        nbytes = self._nbytes(copies)
        for upload in self._up:
            assert upload.abandoned or not _overlap(_targets(copies), _sources(upload.copies)), (
                "an upload still reads what is written"
            )
        self.downloaded_bytes += nbytes
        self.downloaded_until = max(self.downloaded_until, self.now) + nbytes / self.rates.link
        sources = [copy.source.clone() for copy in copies]
        self._down.append(Transfer(self._down, copies, [], sources))
        return Point(self.downloaded_until, self._down[-1])

    @may_fail
    @alone
    def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Point]) -> Span:
        for event in after:
            self._reach(event)
        self.cpu_bytes += nbytes
        before = [memory.clone() for memory in self._shared]
        for target, source in job.down:
            target.copy_(source)
        job.work.run()
        found = [Copy(memory, memory.clone()) for memory in self._shared]
        for memory, old in zip(self._shared, before, strict=True):
            memory.copy_(old)
        changed = [copy for copy in found if not _same(*copy)]
        self._results.append(Transfer(self._results, changed, []))
        begin = max([self.cpu_until, *(event.time for event in after)])
        self.cpu_until = begin + self.rates.handover + nbytes / self.rates.cpu
        return Span(Point(begin), Point(self.cpu_until, self._results[-1]))

    @alone
    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        memory = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        self._shared.append(memory)
        return Shared(memory, memory)

    def reach(self, memory: Tensor) -> Tensor:
        assert memory.is_contiguous()
        return memory

    def pin(self, memory: Tensor) -> None:
        assert memory.is_contiguous()
        assert not _overlap([memory], self.pinned), "memory is pinned twice"
        if self.most_pinned is not None and sum(slab.nbytes for slab in self.pinned) + memory.nbytes > self.most_pinned:
            raise CacheFullError("lower cpu_memory")
        self.pinned.append(memory)

    def unpin(self, memory: Tensor) -> None:
        self.pinned = [slab for slab in self.pinned if slab.data_ptr() != memory.data_ptr()]

    def _check_upload(self, copies: Sequence[Copy], after: Sequence[Point], begin: float) -> None:
        unordered = list(self._down)
        for event in after:
            if event.transfer in unordered:
                unordered = unordered[unordered.index(event.transfer) + 1 :]
        for download in unordered:
            assert download.abandoned or not _overlap(_sources(copies), _targets(download.copies)), (
                "what is read has not arrived"
            )
        for tensor, until in self._reads:
            assert until <= begin or not _overlap(_targets(copies), [tensor]), "the computation reads what is written"

    def _reach(self, event: Point) -> None:
        if event.transfer is not None:
            self._carry_out(event.transfer)

    def _carry_out(self, transfer: Transfer) -> None:
        """Carries out a transfer, and those before it in its queue."""
        while transfer in transfer.line:
            first = transfer.line.popleft()
            for event in first.after:
                self._reach(event)
            for index, (target, source) in enumerate(first.copies):
                assert target.is_contiguous()
                assert source.is_contiguous()
                if first.sources is not None and not first.abandoned:
                    assert _same(source, first.sources[index]), "a source has changed"
                target.copy_(source)

    @staticmethod
    def _nbytes(copies: Sequence[Copy]) -> int:
        return sum(copy.source.nbytes for copy in copies)


def _targets(copies: Sequence[Copy]) -> list[Tensor]:
    return [copy.target for copy in copies]


def _sources(copies: Sequence[Copy]) -> list[Tensor]:
    return [copy.source for copy in copies]


def _overlap(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether contiguous tensors share memory."""
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in others]
    return any(
        tensor.data_ptr() < end and begin < tensor.data_ptr() + tensor.nbytes
        for tensor in some
        for begin, end in ranges
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal bit for bit, NaN included."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
