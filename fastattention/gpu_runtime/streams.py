"""Stream operations other than kernel launches: copies, and 32-bit flags that synchronize streams and the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fastattention.gpu_runtime.module import checked, driver_bindings

U32_MODULUS = 1 << 32  # flags have 32 bits and wrap around
_BEHIND_ALL = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: whatever the stream has done before is visible first
_REACHED = 0  # CU_STREAM_WAIT_VALUE_GEQ


class StreamOperation(NamedTuple):
    """Something to enqueue on a stream, with all that the driver is told of it: for calls that do it again and again.

    Python takes longer to make it than the driver to enqueue it.
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
    """Enqueues such a copy."""
    answer = driver_bindings().cuMemcpyAsync(target, source, nbytes, stream)
    if answer[0]:
        checked(answer, f"copying {nbytes} bytes")


def stream_write_value32(address: int, number: int, stream: int) -> None:
    """cuStreamWriteValue32: the stream writes `number` to an address after all work enqueued before it.

    For numbers that are written once. Flags, which are written again and again, are prepared: FlagWrites.
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
        """On a stream of the current device, behind all that the stream has done before."""
        _enqueue(self._operations, stream, self._doing)


class FlagWrites(FlagOperations):
    """32 bits written to each of some addresses, in their order."""

    def __init__(self, addresses: Sequence[int], value: int) -> None:
        super().__init__([_write(address, value) for address in addresses], "writing flags")


class FlagWaits(FlagOperations):
    """Flags at some addresses, in this GPU's memory, that others raise: a stream waits for all, and lowers them again.

    Each is 0 at first, 1 when it is raised; nobody raises it again before it is lowered.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        super().__init__(_awaited(addresses), "waiting for another GPU")


class StreamBarrier(FlagOperations):
    """A barrier of streams of several GPUs, without a kernel: each raises a flag at every other.

    What a stream has done before is visible to all, once they go on.

    mine: addresses of the flags that others raise, in this GPU's memory; theirs: of those that this one raises. Each is
    0 at first. They are lowered again before anybody goes on, so that a barrier can be used over and over, also by
    graphs; but between two of one kind every stream must have passed another.
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
