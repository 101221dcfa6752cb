"""Device: the operations that the offloaded cache needs from an accelerator, and their CUDA implementation."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fastattention.errors import ArgumentError, CacheFullError
from fastattention.offload.cpu_stream import CpuStream

# A point in the work of a device. Its type depends on the device.
Event = Any


class Span(NamedTuple):
    """The begin and end of some work, without its waiting time; both events know their time."""

    begin: Event
    end: Event


class Upload(NamedTuple):
    """The time of an upload. before: the end of the previous upload, by any caller; None for the first."""

    before: Event
    begin: Event
    end: Event


class Copy(NamedTuple):
    """A copy between the device and host memory: two tensors of one shape, both contiguous."""

    target: Tensor
    source: Tensor


class CpuWork(Protocol):
    """Work of the CPU, done when the C function at address `function` is called with `argument`."""

    function: int
    argument: int

    def run(self) -> None:
        """Does the work in this thread. Raises the error that `check` would."""

    def check(self) -> None:
        """Raises an error if the work has failed; for work that is done."""


class Shared(NamedTuple):
    """Host memory that both sides reach, as a tensor of each."""

    host: Tensor
    device: Tensor  # reads and writes go over the link


class CpuJob(NamedTuple):
    """Copies to host memory, then work; and the objects that must stay alive until it is done."""

    down: Sequence[Copy]
    work: CpuWork


class Device(abc.ABC):
    """An accelerator that computes in order, copies in both directions concurrently, and waits for events by itself.

    Nothing here waits on the host.
    """

    torch_device: torch.device

    @abc.abstractmethod
    def mark(self) -> Event:
        """An event after all computation enqueued so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Makes later computation wait for `event`."""

    @abc.abstractmethod
    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """Seconds between events of a Span or an Upload, negative if `end` came first; None while either is to come."""

    @abc.abstractmethod
    def upload(self, copies: Sequence[Copy], after: Sequence[Event]) -> Upload:
        """Copies from host memory, after earlier uploads and the given events."""

    @abc.abstractmethod
    def download(self, copies: Sequence[Copy]) -> Event:
        """Copies to host memory, after earlier downloads and the computation so far; returns the event at its end."""

    @abc.abstractmethod
    def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Event]) -> Span:
        """Runs a job whose work reads nbytes of host memory, after earlier jobs and the given events.

        Work that fails gives NaN as its results, and raises in a later call.
        """

    @abc.abstractmethod
    def branch(self, number: int) -> contextlib.AbstractContextManager[object]:
        """A context in which the calling thread computes on a branch of its own: the same for the same number.

        Branches run concurrently and unordered: `mark` in one and `wait` in another order them.
        """

    @abc.abstractmethod
    def adopt(self, tensor: Tensor) -> None:
        """Tells that this branch uses a tensor of another one, whose memory must not be reused before."""

    @abc.abstractmethod
    def pin(self, memory: Tensor) -> None:
        """Pins host memory, so that the device copies it asynchronously. Raises CacheFullError when it cannot."""

    @abc.abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undoes `pin`, after all copies."""

    @abc.abstractmethod
    def reach(self, memory: Tensor) -> Tensor:
        """Pinned host memory as a tensor of the device, which reads it over the link. It need not be pinned to the end.

        The result must not outlive `memory`.
        """

    @abc.abstractmethod
    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """A little memory for queries that go down and results that come up."""


class CudaDevice(Device):
    """A GPU: the computation is torch's current stream, copies have a stream each way."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ArgumentError(f"device={device}: layers can be kept in CPU memory beside a CUDA device only")
        self.torch_device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded: torch.cuda.Event | None = None  # end of the last upload
        self._branches: list[torch.cuda.Stream] = []
        self._cpu: dict[int, CpuStream] = {}  # one for every compute stream
        self._running = Running()
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def mark(self) -> Event:
        """An event of the current stream."""
        return torch.cuda.current_stream(self.torch_device).record_event()

    def wait(self, event: Event) -> None:
        """Makes the current stream wait."""
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """Seconds by the GPU's clock, for events of any streams."""
        if not (begin.query() and end.query()):
            return None
        return 1e-3 * float(begin.elapsed_time(end))

    def upload(self, copies: Sequence[Copy], after: Sequence[Event]) -> Upload:
        """Copies on the stream for uploads."""
        before = self._uploaded
        with torch.cuda.stream(self._up):
            begin = self._begin(self._up, after)
            self._copy(copies)
            self._uploaded = end = _timed_event(self._up)
        return Upload(before, begin, end)

    def download(self, copies: Sequence[Copy]) -> Event:
        """Copies on the stream for downloads."""
        self._down.wait_event(self.mark())
        with torch.cuda.stream(self._down):
            self._copy(copies)
        for _, source in copies:
            source.record_stream(self._down)  # it may be a temporary, whose memory must not be reused yet
        return self._down.record_event()

    def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Event]) -> Span:
        """Runs it on a stream of its own. This thread goes on, and a native worker thread does the work."""
        self._running.check()
        cpu = self._cpu_stream()
        running = self._running.keep(job)
        with torch.cuda.stream(cpu.stream):
            try:
                begin = self._begin(cpu.stream, after)
                self._copy(job.down)
                cpu.enqueue(job.work.function, job.work.argument)
            finally:
                cpu.wait()
                running.end = _timed_event(cpu.stream)
        return Span(begin, running.end)

    def branch(self, number: int) -> contextlib.AbstractContextManager[object]:
        """A stream for each number, which is kept: torch keeps memory for every stream that it has seen."""
        while len(self._branches) <= number:
            self._branches.append(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._branches[number])
        return stream

    def adopt(self, tensor: Tensor) -> None:
        """Records the tensor with the current stream."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def pin(self, memory: Tensor) -> None:
        """Registers memory that torch did not allocate."""
        status = self._runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if int(status) != 0:
            raise CacheFullError(
                f"{memory.nbytes} bytes of host memory could not be pinned (CUDA error {int(status)}); "
                "lower cpu_memory or free memory on the host"
            )

    def unpin(self, memory: Tensor) -> None:
        """Unpins memory once the device is idle: its copies are then over, and so are jobs, which keep memory alive."""
        torch.cuda.synchronize(self.torch_device)
        self._running.forget()
        self._runtime.cudaHostUnregister(memory.data_ptr())

    def reach(self, memory: Tensor) -> Tensor:
        """The same addresses: pinned memory is mapped."""
        return _as_device_tensor(memory, self.torch_device)

    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """Pinned memory, which kernels address directly: their reads do not wait for other copies."""
        host = torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return Shared(host, _as_device_tensor(host, self.torch_device))

    def _cpu_stream(self) -> CpuStream:
        """The CpuStream of the current stream: jobs of branches do not wait for each other."""
        key = torch.cuda.current_stream(self.torch_device).cuda_stream
        if key not in self._cpu:
            self._cpu[key] = CpuStream(self.torch_device)
        return self._cpu[key]

    @staticmethod
    def _begin(stream: torch.cuda.Stream, after: Sequence[Event]) -> torch.cuda.Event:
        """Makes a stream wait for events, and returns an event after the wait."""
        for event in after:
            stream.wait_event(event)
        return _timed_event(stream)

    @staticmethod
    def _copy(copies: Sequence[Copy]) -> None:
        """Copies in the current stream."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event at the current point of a stream, with its time."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stream.record_event(event)
    return event


class _Interface:
    """Memory with the interface by which torch and other libraries share it."""

    def __init__(self, memory: Tensor) -> None:
        data = (memory.data_ptr(), False)  # not read-only
        self.__cuda_array_interface__ = {"shape": (memory.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def _as_device_tensor(pinned: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a tensor of a GPU; it must live as long as that is used."""
    return torch.as_tensor(_Interface(pinned), dtype=torch.uint8, device=device).view(pinned.dtype).view(pinned.shape)


@dataclass
class RunningJob:
    """A job that may begin at any time. Its end is known once all of it has been enqueued."""

    job: CpuJob
    end: torch.cuda.Event | None = None


class Running:
    """Jobs that have not ended yet, whose memory must stay."""

    def __init__(self) -> None:
        self._jobs: deque[RunningJob] = deque()
        self._lock = threading.Lock()

    def keep(self, job: CpuJob) -> RunningJob:
        """Keeps a job before it may begin: a job may run even if enqueueing it is interrupted."""
        running = RunningJob(job)
        self._jobs.append(running)
        return running

    def check(self) -> None:
        """Forgets jobs that have ended. Raises the error of one that failed."""
        for job in self.forget():
            job.work.check()

    def forget(self) -> list[CpuJob]:
        """Drops jobs that have ended, and returns them."""
        ended = []
        with self._lock:
            while self._jobs and (end := self._jobs[0].end) is not None and end.query():  # type: ignore[no-untyped-call]
                ended.append(self._jobs.popleft().job)
        return ended


@functools.cache
def cuda_device(device: torch.device) -> CudaDevice:
    """The single CudaDevice of a GPU. All caches of the process share its streams and measured bandwidths."""
    return CudaDevice(device)
