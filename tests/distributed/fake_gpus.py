"""Fake GPUs: ranks are threads, and so are their streams, which run enqueued operations as late as allowed.

Memory is the process's own, so that all ranks reach it. Streams carry out operations in order, and synchronize only by
events and flags. Each pauses at times. The driver's copies and flags are done by ctypes, and so is the kernel of
peer_kernel.
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
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from cuda.bindings import driver
from torch import Tensor

from fastattention.backends.common.c_struct import Params
from fastattention.distributed.transports import p2p_base, peer_kernel
from fastattention.distributed.transports.all_reduce import AllReduceConfig, AllReduceParams
from fastattention.distributed.transports.p2p_base import PeerToPeer
from fastattention.gpu_runtime import module, streams
from fastattention.gpu_runtime.chips import CHIPS

PATIENCE = 20.0  # seconds after which a wait counts as a hang
_WRITE = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32


class Event:
    """A point of a stream: the last record before a wait begins."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def record(self, stream: Stream) -> None:
        self.happened = threading.Event()
        stream.enqueue(self.happened.set)

    def wait(self, stream: Stream) -> None:
        happened = self.happened

        def await_it() -> None:
            assert happened.wait(PATIENCE), "an event never happens"

        stream.enqueue(await_it)


class Stream:
    """A queue of operations, and a thread that carries them out."""

    streams: list[Stream] = []  # noqa: RUF012

    def __init__(self) -> None:
        Stream.streams.append(self)
        self.cuda_stream = len(Stream.streams)
        self.error: Exception | None = None
        self.is_stopped = False  # no more operations are carried out
        self.kept: list[Tensor] = []  # tensors that operations may still use after a failed test
        self._operations: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._random = random.Random(self.cuda_stream)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (operation := self._operations.get()) is not None and not self.is_stopped:
            if self._random.random() < 0.3:
                time.sleep(2e-3 * self._random.random())
            try:
                with torch.inference_mode():
                    operation()
            except Exception as error:
                self.error = error
                return

    def enqueue(self, operation: Callable[[], object]) -> None:
        self._operations.put(operation)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)

    def synchronize(self) -> None:
        event = Event()
        event.record(self)
        while not event.happened.wait(0.01) and not self.is_stopped:
            for stream in Stream.streams:
                if stream.error is not None:
                    raise stream.error

    def end(self) -> None:
        self._operations.put(None)


def stream_of(handle: int) -> Stream:
    return Stream.streams[handle - 1]


class Driver:
    """The functions of the CUDA driver that gpu_runtime/streams.py uses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)

    def cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[int]:  # noqa: N802
        stream_of(stream).enqueue(lambda: ctypes.memmove(target, source, nbytes))
        return (0,)

    def cuStreamWriteValue32(self, stream: int, address: int, number: int, _: int) -> tuple[int]:  # noqa: N802
        stream_of(stream).enqueue(lambda: write_flag(address, number))
        return (0,)

    def cuStreamBatchMemOp(self, stream: int, count: int, operations: Sequence[Any], _: int) -> tuple[int]:  # noqa: N802
        assert count == len(operations)
        for operation in operations:
            stream_of(stream).enqueue(lambda operation=operation: carry_out(operation))
        return (0,)


def flag_at(address: Any) -> ctypes.c_uint32:
    return ctypes.c_uint32.from_address(int(address))


def write_flag(address: Any, number: int) -> None:
    flag_at(address).value = number


def carry_out(operation: Any) -> None:
    """Writes a flag, or waits for one."""
    if operation.operation == _WRITE:
        write_flag(operation.writeValue.address, int(operation.writeValue.value))
    else:
        await_flag(operation.waitValue.address, int(operation.waitValue.value).__eq__)


def await_flag(address: Any, is_raised: Callable[[int], bool]) -> None:
    flag, deadline = flag_at(address), time.monotonic() + PATIENCE
    while not is_raised(flag.value):
        if time.monotonic() > deadline:
            raise TimeoutError("a flag is never raised")
        time.sleep(0)


def all_reduce(params: Params, config: AllReduceConfig) -> None:
    """kernels/all_reduce.cuh by one of its CTAs, which adds up everything."""
    barrier(params, config.num_ranks)
    nbytes = params.count * config.dtype.itemsize
    total = torch.zeros(params.count)
    for part in params.parts[: config.num_ranks]:
        total += torch.frombuffer((ctypes.c_char * nbytes).from_address(part), dtype=config.dtype).float()
    rounded = total.to(config.dtype)
    ctypes.memmove(params.out, rounded.data_ptr(), nbytes)
    barrier(params, config.num_ranks)


def barrier(params: Params, num_ranks: int) -> None:
    step = flag_at(params.steps).value = flag_at(params.steps).value + 1
    others = [rank for rank in range(num_ranks) if rank != params.rank]
    for other in others:
        flag_at(params.arrivals[other] + 4 * params.rank).value = step
    for other in others:
        await_flag(params.arrivals[params.rank] + 4 * other, lambda value: value >= step)


class Launch(NamedTuple):
    """A launch of the kernel of peer_kernel."""

    config: AllReduceConfig
    params: Params
    stream: Stream


class Host:
    """The ranks of one host. `here` holds the state of a thread's own rank.

    gpus: chips of gpu_runtime/chips.py, by rank or for all; timeout: that of the group, in seconds.
    """

    def __init__(
        self, size: int, kind: type[PeerToPeer], gpus: str | Sequence[str] = "H100", timeout: float = PATIENCE
    ) -> None:
        self.size, self.kind = size, kind
        self.here = threading.local()
        self.launches: list[list[Launch]] = [[] for _ in range(size)]  # by rank
        self._gpus = [gpus] * size if isinstance(gpus, str) else gpus
        backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=timeout)))
        self._group: Any = SimpleNamespace(group_name="fake", _get_backend=lambda device: backend)
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size
        self._taken: list[Tensor] = []  # kept, because streams may still use freed memory

    def synchronize(self, *_: object) -> None:
        for stream in self.here.streams:
            stream.synchronize()

    def make_stream(self, *_: object, **__: object) -> Stream:
        self.here.streams.append(Stream())
        return self.here.streams[-1]  # type: ignore[no-any-return]

    def gather(self, value: Any, _: object) -> list[Any]:
        """The values of all ranks."""
        self._given[self.here.rank] = value
        self._barrier.wait(PATIENCE)
        values = list(self._given)
        self._barrier.wait(PATIENCE)  # before any rank gives another
        return values

    def rendezvous(self, memory: Tensor, group: object) -> SimpleNamespace:
        return SimpleNamespace(buffer_ptrs=self.gather(memory.data_ptr(), group), memory=memory)

    def take(self, nbytes: int, **like: Any) -> Tensor:
        """Memory of NaN bits, as if unwritten."""
        self._taken.append(torch.empty(nbytes, **like).fill_(0xFF))
        return self._taken[-1]

    def load_kernel(self, config: AllReduceConfig, _: object) -> SimpleNamespace:
        """A kernel with its function, whose parameters are copied before a launch returns."""

        def launch(params: Params, num_ctas: int, stream: int) -> None:
            assert (config.num_ranks, params.num_ctas, params.rank) == (self.size, num_ctas, self.here.rank)
            one = Launch(config, AllReduceParams.from_buffer_copy(params), stream_of(stream))
            one.stream.enqueue(lambda: all_reduce(one.params, config))
            self.launches[self.here.rank].append(one)

        return SimpleNamespace(functions=[SimpleNamespace(launch=launch)])

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """This rank's calls count as captured in a CUDA graph, but run immediately."""
        self.here.captures = True
        try:
            yield
        finally:
            self.here.captures = False

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Replaces everything of GPUs that transports use."""
        from torch.distributed import _symmetric_memory

        here = self.here
        with contextlib.ExitStack() as stack:
            for where, name, what in (
                (torch.cuda, "Event", Event),
                (torch.cuda, "Stream", self.make_stream),
                (torch.cuda, "current_stream", lambda device: here.streams[0]),
                (torch.cuda, "synchronize", self.synchronize),
                (torch.cuda, "is_current_stream_capturing", lambda: here.captures),
                (dist, "get_rank", lambda group: here.rank),
                (dist, "get_world_size", lambda group: self.size),
                (_symmetric_memory, "empty", self.take),
                (_symmetric_memory, "rendezvous", self.rendezvous),
                (p2p_base, "_why_not_group", lambda group, device: None),
                (peer_kernel, "gather", self.gather),
                (streams, "driver_bindings", Driver),
                (module, "current_stream", lambda index: here.streams[0].cuda_stream),
                (module, "device_limits", lambda index: CHIPS[self._gpus[here.rank]]),
                (module, "load_kernel", self.load_kernel),
            ):
                stack.enter_context(mock.patch.object(where, name, what))
            yield

    def run(self, task: Callable[[Any, int, Stream], Any]) -> list[Any]:
        """The results of task(transport, rank, compute stream), run on all ranks at once."""

        def on(rank: int) -> Any:
            self.here.rank, self.here.streams, self.here.captures = rank, [Stream()], False
            transport = self.kind(self._group, torch.device("cpu"))
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
