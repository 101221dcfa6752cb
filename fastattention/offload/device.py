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

# A point in the work of a device. What it is, is the device's own business.
Event = Any


class Span(NamedTuple):
    """When something takes place, without what it waits for; both know their time."""

    begin: Event
    end: Event


class Upload(NamedTuple):
    """When an upload takes place. before: the end of the one before it, whoever asked for that; None for the first."""

    before: Event
    begin: Event
    end: Event


class Copy(NamedTuple):
    """Numbers to move between the device and host memory: two tensors of one shape, both contiguous."""

    target: Tensor
    source: Tensor


class CpuWork(Protocol):
    """What the CPU does when the C function at address `function` is called with `argument`."""

    function: int
    argument: int

    def run(self) -> None:
        """Does it in this thread. Raises the error that `check` would."""

    def check(self) -> None:
        """Once it is done: raises an error if it could not be."""


class Shared(NamedTuple):
    """Host memory that both sides reach: the same numbers as a tensor of each."""

    host: Tensor
    device: Tensor  # reads and writes go over the link


class CpuJob(NamedTuple):
    """Copies to host memory, then work; and what that works with, which must stay until it is done."""

    down: Sequence[Copy]
    work: CpuWork


class Device(abc.ABC):
    """An accelerator that computes in order, copies in both directions beside that, and waits for events on its own.

    Nothing here waits on the host.
    """

    torch_device: torch.device

    @abc.abstractmethod
    def mark(self) -> Event:
        """The point that the computation has reached when all that was asked of it so far is done."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Lets the computation go on only after `event`."""

    @abc.abstractmethod
    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """Between events of a Span or an Upload, negative if `end` came first; None while either is still to come."""

    @abc.abstractmethod
    def upload(self, copies: Sequence[Copy], after: Sequence[Event]) -> Upload:
        """Copies from host memory, after earlier uploads and the given events."""

    @abc.abstractmethod
    def download(self, copies: Sequence[Copy]) -> Event:
        """Copies to host memory, after earlier downloads and the computation so far; returns the end of it."""

    @abc.abstractmethod
    def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Event]) -> Span:
        """A job whose work reads nbytes of host memory, after earlier ones and the given events.

        Work that could not be done raises in a later call, with NaN as its results.
        """

    @abc.abstractmethod
    def branch(self, number: int) -> contextlib.AbstractContextManager[object]:
        """In it, the computation of the thread that enters is in a line of its own: the same for the same number.

        Lines run side by side and order nothing among each other: `mark` in one and `wait` in the other do.
        """

    @abc.abstractmethod
    def adopt(self, tensor: Tensor) -> None:
        """The computation uses a tensor of another branch, whose memory must not be given away before it has."""

    @abc.abstractmethod
    def pin(self, memory: Tensor) -> None:
        """Makes host memory fit for copies that the device does on its own. Raises CacheFullError when it cannot be."""

    @abc.abstractmethod
    def unpin(self, memory: Tensor) -> None:
        """Undoes `pin`, after all copies."""

    @abc.abstractmethod
    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """A little memory for what goes down and comes up."""


class CudaDevice(Device):
    """A GPU: the computation is torch's current stream, copies have a stream each way."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ArgumentError(f"device={device}: layers can be kept in CPU memory beside a CUDA device only")
        self.torch_device = device
        self._up, self._down = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._uploaded: torch.cuda.Event | None = None  # the end of the last upload
        self._branches: list[torch.cuda.Stream] = []
        self._cpu: dict[int, CpuStream] = {}  # for every stream that computes
        self._running = Running()
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def mark(self) -> Event:
        """An event of the current stream."""
        return torch.cuda.current_stream(self.torch_device).record_event()

    def wait(self, event: Event) -> None:
        """The current stream waits."""
        torch.cuda.current_stream(self.torch_device).wait_event(event)

    def seconds_between(self, begin: Event, end: Event) -> float | None:
        """By the GPU's clock, whatever the streams."""
        if not (begin.query() and end.query()):
            return None
        return 1e-3 * float(begin.elapsed_time(end))

    def upload(self, copies: Sequence[Copy], after: Sequence[Event]) -> Upload:
        """On the stream for uploads."""
        before = self._uploaded
        with torch.cuda.stream(self._up):
            begin = self._begin(self._up, after)
            self._copy(copies)
            self._uploaded = end = _timed_event(self._up)
        return Upload(before, begin, end)

    def download(self, copies: Sequence[Copy]) -> Event:
        """On the stream for downloads."""
        self._down.wait_event(self.mark())
        with torch.cuda.stream(self._down):
            self._copy(copies)
        for _, source in copies:
            source.record_stream(self._down)  # may be a temporary, whose memory must not be given away yet
        return self._down.record_event()

    def run_on_cpu(self, job: CpuJob, nbytes: int, after: Sequence[Event]) -> Span:
        """On a stream of its own: this thread goes on, and one without Python works when its turn comes."""
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
        """A stream, kept: torch keeps memory for every stream that it has seen."""
        while len(self._branches) <= number:
            self._branches.append(torch.cuda.Stream(self.torch_device))  # type: ignore[no-untyped-call]
        stream: contextlib.AbstractContextManager[object] = torch.cuda.stream(self._branches[number])
        return stream

    def adopt(self, tensor: Tensor) -> None:
        """Recorded with the current stream."""
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
        """The copies of this device are over when it is idle, and so are its jobs, which keep memory of theirs."""
        torch.cuda.synchronize(self.torch_device)
        self._running.forget()
        self._runtime.cudaHostUnregister(memory.data_ptr())

    def empty_shared(self, shape: Sequence[int], dtype: torch.dtype) -> Shared:
        """Pinned memory, which kernels address as the host does: what they read does not wait for other copies."""
        host = torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)
        return Shared(host, _as_device_tensor(host, self.torch_device))

    def _cpu_stream(self) -> CpuStream:
        """Of the current stream: jobs of branches do not wait for each other."""
        key = torch.cuda.current_stream(self.torch_device).cuda_stream
        if key not in self._cpu:
            self._cpu[key] = CpuStream(self.torch_device)
        return self._cpu[key]

    @staticmethod
    def _begin(stream: torch.cuda.Stream, after: Sequence[Event]) -> torch.cuda.Event:
        """Lets a stream wait, and returns the point at which it has."""
        for event in after:
            stream.wait_event(event)
        return _timed_event(stream)

    @staticmethod
    def _copy(copies: Sequence[Copy]) -> None:
        """In the current stream."""
        for target, source in copies:
            target.copy_(source, non_blocking=True)


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """The point that a stream has reached, which will know its time."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    stream.record_event(event)
    return event


class _Interface:
    """Memory, as torch and others take it from each other."""

    def __init__(self, memory: Tensor) -> None:
        data = (memory.data_ptr(), False)  # not read-only
        self.__cuda_array_interface__ = {"shape": (memory.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def _as_device_tensor(pinned: Tensor, device: torch.device) -> Tensor:
    """Pinned memory as a tensor of a GPU; it must stay as long as that is used."""
    return torch.as_tensor(_Interface(pinned), dtype=torch.uint8, device=device).view(pinned.dtype).view(pinned.shape)


@dataclass
class RunningJob:
    """A job that may begin at any time; its end is known once all of it has been asked for."""

    job: CpuJob
    end: torch.cuda.Event | None = None


class Running:
    """Jobs that have not ended yet, whose memory must stay."""

    def __init__(self) -> None:
        self._jobs: deque[RunningJob] = deque()
        self._lock = threading.Lock()

    def keep(self, job: CpuJob) -> RunningJob:
        """Keeps a job before anybody may begin it: one whose asking is interrupted may run all the same."""
        running = RunningJob(job)
        self._jobs.append(running)
        return running

    def check(self) -> None:
        """Forgets jobs that have ended. Raises the error of one that failed."""
        for job in self.forget():
            job.work.check()

    def forget(self) -> list[CpuJob]:
        """Those that have ended, and are kept no longer."""
        ended = []
        with self._lock:
            while self._jobs and (end := self._jobs[0].end) is not None and end.query():  # type: ignore[no-untyped-call]
                ended.append(self._jobs.popleft().job)
        return ended


@functools.cache
def cuda_device(device: torch.device) -> CudaDevice:
    """The one CudaDevice of a GPU, whose streams and measured bandwidths all caches of the process share."""
    return CudaDevice(device)
