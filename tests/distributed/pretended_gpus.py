"""Ranks that are threads, each with GPU streams that are threads too: what copy_engine enqueues runs as late as it may.

Memory is the process's own, so that all ranks reach it. Streams carry out operations in order and know nothing of each
other but events and flags; each now and then stops for a while. The driver's copies and flags are done by ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from fastattention.backends.cuda import summing
from fastattention.backends.cuda.jit import module, streams
from fastattention.distributed.transports import copy_engine
from fastattention.distributed.transports.copy_engine import CopyEngine

PATIENCE = 20.0  # seconds until a stream that waits is taken to wait for ever
DELAY = 2e-3

_WRITE = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32


class Event:
    def __init__(self) -> None:
        self.happened = threading.Event()

    def await_it(self) -> None:
        if not self.happened.wait(PATIENCE):
            raise TimeoutError("an event never happens")


class Stream:
    """A queue of operations, and a thread that carries them out."""

    streams: list[Stream] = []  # noqa: RUF012

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = len(Stream.streams) + 1
        Stream.streams.append(self)
        self.error: Exception | None = None
        self._operations: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._random = random.Random(self.cuda_stream)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (operation := self._operations.get()) is not None:
            if self._random.random() < 0.3:
                time.sleep(DELAY * self._random.random())
            try:
                with torch.inference_mode():
                    operation()
            except Exception as error:
                self.error = error
                return

    def enqueue(self, operation: Callable[[], object]) -> None:
        self._operations.put(operation)

    def record_event(self) -> Event:
        event = Event()
        self.enqueue(event.happened.set)
        return event

    def wait_event(self, event: Event) -> None:
        self.enqueue(event.await_it)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        event = self.record_event()
        while not event.happened.wait(0.01):
            for stream in Stream.streams:
                if stream.error is not None:
                    raise stream.error

    def end(self) -> None:
        self._operations.put(None)


def stream_of(handle: int) -> Stream:
    return Stream.streams[handle - 1]


class Driver:
    """What streams.py asks of the CUDA driver."""

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:  # noqa: N802
        stream_of(stream).enqueue(lambda: ctypes.memmove(target, source, nbytes))
        return (0,)

    def cuStreamBatchMemOp(self, stream: int, count: int, operations: Sequence[Any], _: int) -> tuple[int]:  # noqa: N802
        assert count == len(operations)
        for operation in operations:
            stream_of(stream).enqueue(lambda operation=operation: carry_out(operation))
        return (0,)


def carry_out(operation: Any) -> None:
    """Writes a flag, or waits for one."""
    if operation.operation == _WRITE:
        flag_at(operation.writeValue.address).value = int(operation.writeValue.value)
        return
    flag, deadline = flag_at(operation.waitValue.address), time.monotonic() + PATIENCE
    while flag.value != int(operation.waitValue.value):
        if time.monotonic() > deadline:
            raise TimeoutError("a flag is never raised")
        time.sleep(0)


def flag_at(address: Any) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(int(address))


class Host:
    """The ranks of one host. `here` is what a thread knows of its own rank."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.here = threading.local()
        self._barrier = threading.Barrier(size)
        self._addresses = [0] * size
        self._taken: list[Tensor] = []
        self._empty = torch.empty

    def synchronize(self, *_: object) -> None:
        for stream in self.here.streams:
            stream.synchronize()

    def make_stream(self, *_: object, **__: object) -> Stream:
        self.here.streams.append(Stream())
        return self.here.streams[-1]  # type: ignore[no-any-return]

    def rendezvous(self, memory: Tensor, _: object) -> SimpleNamespace:
        self._addresses[self.here.rank] = memory.data_ptr()
        self._barrier.wait(PATIENCE)
        addresses = list(self._addresses)
        self._barrier.wait(PATIENCE)  # before anybody writes another
        return SimpleNamespace(buffer_ptrs=addresses, memory=memory)

    def take(self, *shape: int, **like: Any) -> Tensor:
        """Memory full of what nobody has written: NaN as floats. It is kept, as streams may still use what is freed."""
        self._taken.append(self._empty(*shape, **like).fill_(0xFF))
        return self._taken[-1]

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """All that copy_engine uses of GPUs."""
        from torch.distributed import _symmetric_memory

        here = self.here
        with contextlib.ExitStack() as stack:
            for where, name, what in (
                (torch, "empty", self.take),
                (torch.cuda, "Stream", self.make_stream),
                (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
                (torch.cuda, "current_stream", lambda device: here.streams[0]),
                (torch.cuda, "synchronize", self.synchronize),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (dist, "get_rank", lambda group: here.rank),
                (dist, "get_world_size", lambda group: self.size),
                (_symmetric_memory, "empty", self.take),
                (_symmetric_memory, "rendezvous", self.rendezvous),
                (copy_engine, "_why_not_group", lambda group, device: None),
                (streams, "driver_bindings", Driver),
                (module, "current_stream", lambda index: here.streams[0].cuda_stream),
                (summing, "sum_parts", sum_parts),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            yield

    def run(self, task: Callable[[CopyEngine, int, Stream], Any]) -> list[Any]:
        """What task(transport, rank, stream of the compute) returns on each rank, all of them at once."""

        def on(rank: int) -> Any:
            self.here.rank, self.here.streams = rank, [Stream()]
            transport = CopyEngine(SimpleNamespace(group_name="pretended"), torch.device("cpu"))  # type: ignore[arg-type]
            try:
                answer = task(transport, rank, self.here.streams[0])
                self.synchronize()
            finally:
                for stream in self.here.streams:
                    stream.end()
            return answer

        with self.patched(), ThreadPoolExecutor(self.size) as ranks:
            return list(ranks.map(on, range(self.size)))


def sum_parts(
    parts: Sequence[int], shared: int, out: int, count: int, dtype: torch.dtype, device_index: int | None, stream: int
) -> None:
    """The kernel of that name."""

    def add() -> None:
        total = sum((numbers_at(part, count, dtype).float() for part in parts), torch.zeros(count)).to(dtype)
        numbers_at(shared, count, dtype).copy_(total)
        numbers_at(out, count, dtype).copy_(total)

    stream_of(stream).enqueue(add)


def numbers_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count)
