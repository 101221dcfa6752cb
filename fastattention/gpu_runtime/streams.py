"""Stream operations other than kernel launches: copies, and 32-bit flags that synchronize streams and the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fastattention.gpu_runtime.module import checked, driver_bindings

U32_MODULUS = 1 << 32  # flags have 32 bits and wrap around
_BEHIND_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: earlier writes of the stream are visible first
_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ


class StreamOperation(NamedTuple):
    """An operation to enqueue on a stream, prepared with all its arguments for calls that repeat it.

    Making it in Python takes longer than enqueueing it.
    """

    enqueue: Callable[[], tuple[Any, ...]]  # returns the answer of the driver
    doing: str  # for errors


def enqueue_all(operations: Iterable[StreamOperation]) -> None:
    """Enqueues them in their order."""
    for enqueue, doing in operations:
        answer = enqueue()
        if answer[0]:
            checked(answer, doing)


def copy_operation(target: int, source: int, nbytes: int, stream: int) -> StreamOperation:
    """A copy between addresses of this process, of any GPUs that it can reach."""
    copy = functools.partial(driver_bindings().cuMemcpyAsync, target, source, nbytes, stream)
    return StreamOperation(copy, f"copying {nbytes} bytes")


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueues a copy between addresses of this process, of any GPUs that it can reach."""
    answer = driver_bindings().cuMemcpyAsync(target, source, nbytes, stream)
    if answer[0]:
        checked(answer, f"copying {nbytes} bytes")


def stream_write_value32(address: int, number: int, stream: int) -> None:
    """cuStreamWriteValue32: the stream writes `number` to an address after all work enqueued before it.

    This is for values that are written once. FlagWrites prepares flags that are written again and again.
    """
    checked(driver_bindings().cuStreamWriteValue32(stream, address, number, _BEHIND_ALL), "writing a number")


def stream_wait_value32(address: int, number: int, stream: int) -> None:
    """cuStreamWaitValue32: the stream waits until the value at an address has reached `number`, modulo 2**32."""
    checked(driver_bindings().cuStreamWaitValue32(stream, address, number, _REACHED), "waiting for a number")


class FlagOperations:
    """Flags that a stream writes or waits for, one after the other, without a kernel. Each is 32 bits."""

    def __init__(self, operations: Sequence[Any], doing: str) -> None:
        self._operations, self._doing = operations, doing

    def on(self, stream: int) -> StreamOperation:
        """`enqueue` on one stream."""
        batch = driver_bindings().cuStreamBatchMemOp
        return StreamOperation(
            functools.partial(batch, stream, len(self._operations), self._operations, 0), self._doing
        )

    def enqueue(self, stream: int) -> None:
        """Enqueues it on a stream of the current device, after all earlier work of the stream."""
        _enqueue(self._operations, stream, self._doing)


class FlagWrites(FlagOperations):
    """32 bits written to each of some addresses, in their order."""

    def __init__(self, addresses: Sequence[int], value: int) -> None:
        super().__init__([_write(address, value) for address in addresses], "writing flags")


class FlagWaits(FlagOperations):
    """Flags in this GPU's memory that other GPUs set: a stream waits for all of them, and resets them.

    Each is 0 at first, and 1 when it is set. No rank sets it again before it is reset.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        super().__init__(_awaited(addresses), "waiting for another GPU")


class StreamBarrier(FlagOperations):
    """A barrier of streams of several GPUs, without a kernel: each sets a flag at every other.

    Earlier writes of a stream are visible to all streams after the barrier.

    mine: addresses of the flags in this GPU's memory that others set; theirs: of the flags that this GPU sets. Each is
        0 at first. They are reset before any stream goes on, so that a barrier can be used again and again, also in
        graphs. But between two uses of one barrier every stream must have passed another barrier.
    """

    def __init__(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        operations = [*(_write(address, 1) for address in theirs), *_awaited(mine)]
        super().__init__(operations, "waiting for other GPUs")


def _enqueue(operations: Sequence[Any], stream: int, doing: str) -> None:
    answer = driver_bindings().cuStreamBatchMemOp(stream, len(operations), operations, 0)
    if answer[0]:
        checked(answer, doing)


def _awaited(flags: Sequence[int]) -> list[Any]:
    return [operation for flag in flags for operation in (_wait_until_raised(flag), _write(flag, 0))]


def _write(address: int, value: int) -> Any:
    driver = driver_bindings()
    made = driver.CUstreamBatchMemOpParams()
    made.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    made.writeValue.operation = made.operation
    made.writeValue.address, made.writeValue.value = driver.CUdeviceptr(address), value
    made.writeValue.flags = _BEHIND_ALL
    return made


def _wait_until_raised(address: int) -> Any:
    driver = driver_bindings()
    made = driver.CUstreamBatchMemOpParams()
    made.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    made.waitValue.operation = made.operation
    made.waitValue.address, made.waitValue.value = driver.CUdeviceptr(address), 1
    made.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    return made
