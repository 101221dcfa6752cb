"""Ranks that are threads, each with GPU streams that are threads too: what transports enqueue runs as late as it may.

Memory is the process's own, so that all ranks reach it. Streams carry out operations in order and know nothing of each
other but events and flags; each now and then stops for a while. The driver's copies and flags are done by ctypes, as
are the kernels (pretended_kernels.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from distributed import pretended_kernels
from distributed.pretended_kernels import PATIENCE, flag_at
from fastattention.backends.cuda import all_reduce, summing
from fastattention.backends.cuda.kernel_config import AllReduceConfig
from fastattention.backends.cuda.params import AllReduceParams
from fastattention.distributed.transports import on_one_host, peer_kernel
from fastattention.distributed.transports.copy_engine import CopyEngine
from fastattention.distributed.transports.on_one_host import OnOneHost
from fastattention.gpu_runtime import module, streams
from fastattention.gpu_runtime.chips import CHIPS
from fastattention.gpu_runtime.module import KernelLaunch

DELAY = 2e-3

_WRITE = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32


class Event:
    """A point of a stream: where it was recorded last, when somebody begins to wait."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def record(self, stream: Stream) -> None:
        self.happened = threading.Event()
        stream.enqueue(self.happened.set)

    def wait(self, stream: Stream) -> None:
        happened = self.happened
        stream.enqueue(lambda: await_it(happened))


def await_it(happened: threading.Event) -> None:
    if not happened.wait(PATIENCE):
        raise TimeoutError("an event never happens")


class Stream:
    """A queue of operations, and a thread that carries them out."""

    streams: list[Stream] = []  # noqa: RUF012

    def __init__(self, *_: object, **__: object) -> None:
        self.cuda_stream = len(Stream.streams) + 1
        Stream.streams.append(self)
        self.error: Exception | None = None
        self.is_stopped = False  # nothing more is carried out
        self.kept: list[Tensor] = []  # what operations still use that a failed test has forgotten
        self._operations: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._random = random.Random(self.cuda_stream)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (operation := self._operations.get()) is not None and not self.is_stopped:
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
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        event.wait(self)

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

    def cuStreamWriteValue32(self, stream: int, address: int, number: int, _: int) -> tuple[int]:  # noqa: N802
        stream_of(stream).enqueue(lambda: write(address, number))
        return (0,)

    def cuStreamBatchMemOp(self, stream: int, count: int, operations: Sequence[Any], _: int) -> tuple[int]:  # noqa: N802
        assert count == len(operations)
        for operation in operations:
            stream_of(stream).enqueue(lambda operation=operation: carry_out(operation))
        return (0,)


def write(address: int, number: int) -> None:
    flag_at(address).value = number


def carry_out(operation: Any) -> None:
    """Writes a flag, or waits for one."""
    if operation.operation == _WRITE:
        write(operation.writeValue.address, int(operation.writeValue.value))
        return
    flag, deadline = flag_at(operation.waitValue.address), time.monotonic() + PATIENCE
    while flag.value != int(operation.waitValue.value):
        if time.monotonic() > deadline:
            raise TimeoutError("a flag is never raised")
        time.sleep(0)


class Launch(NamedTuple):
    """Of the kernel by which peer_kernel sums."""

    params: AllReduceParams
    stream: Stream


class Host:
    """The ranks of one host. `here` is what a thread knows of its own rank.

    gpu: which of gpu_runtime/chips.py they have; timeout: of the group, in seconds.
    """

    def __init__(
        self, size: int, transport: type[OnOneHost] = CopyEngine, gpu: str = "H100", timeout: float = PATIENCE
    ) -> None:
        self.size = size
        self.here = threading.local()
        self.on_launch: Callable[[Launch], None] = lambda launch: None  # called behind it
        self._make, self._limits = transport, CHIPS[gpu]
        options = SimpleNamespace(_timeout=timedelta(seconds=timeout))
        self._group: Any = SimpleNamespace(
            group_name="pretended", _get_backend=lambda device: SimpleNamespace(options=options)
        )
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

    def launch(self, step: KernelLaunch, params: AllReduceParams, stream: int) -> None:
        """Launches kernels/all_reduce.cuh; `params` is copied before this returns."""
        config = step.variant
        assert isinstance(config, AllReduceConfig)
        assert (config.num_ranks, step.num_ctas) == (self.size, params.num_ctas)
        assert params.rank == self.here.rank
        launched = AllReduceParams.from_buffer_copy(params)
        dtype = getattr(torch, config.dtype)
        stream_of(stream).enqueue(lambda: pretended_kernels.AllReduce(launched, dtype, self.size).run())
        self.here.launches.append(Launch(launched, stream_of(stream)))
        self.on_launch(self.here.launches[-1])

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """All that the transports use of GPUs."""
        from torch.distributed import _symmetric_memory

        here = self.here
        with contextlib.ExitStack() as stack:
            for where, name, what in (
                (torch, "empty", self.take),
                (torch.cuda, "Event", Event),
                (torch.cuda, "Stream", self.make_stream),
                (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
                (torch.cuda, "current_stream", lambda device: here.streams[0]),
                (torch.cuda, "synchronize", self.synchronize),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (dist, "get_rank", lambda group: here.rank),
                (dist, "get_world_size", lambda group: self.size),
                (_symmetric_memory, "empty", self.take),
                (_symmetric_memory, "rendezvous", self.rendezvous),
                (on_one_host, "_why_not_group", lambda group, device: None),
                (peer_kernel, "gather", lambda mine, group: [mine] * self.size),
                (streams, "driver_bindings", Driver),
                (module, "current_stream", lambda index: here.streams[0].cuda_stream),
                (module, "device_limits", lambda index: self._limits),
                (summing, "sum_parts", sum_parts),
                (all_reduce, "launcher", lambda step, params, index: functools.partial(self.launch, step, params)),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            yield

    def run(self, task: Callable[[Any, int, Stream], Any]) -> list[Any]:
        """What task(transport, rank, stream of the compute) returns on each rank, all of them at once."""

        def on(rank: int) -> Any:
            self.here.rank, self.here.streams, self.here.launches = rank, [Stream()], []
            transport = self._make(self._group, torch.device("cpu"))
            try:
                answer = task(transport, rank, self.here.streams[0])
                self.synchronize()
            except BaseException:
                for stream in Stream.streams:
                    stream.is_stopped = True
                raise
            finally:
                for stream in self.here.streams:
                    stream.end()
            return answer

        Stream.streams.clear()
        with self.patched(), ThreadPoolExecutor(self.size) as ranks:
            return list(ranks.map(on, range(self.size)))


def sum_parts(
    parts: Sequence[int], shared: int, out: int, count: int, dtype: torch.dtype, device_index: int | None, stream: int
) -> None:
    """Launches the kernel of that name."""
    stream_of(stream).enqueue(lambda: pretended_kernels.sum_parts(parts, shared, out, count, dtype))
