"""What streams do besides launching kernels: copies, and flags in memory by which they meet others, and the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastattention.backends.cuda.jit.module import checked, driver_bindings

CIRCLE = 1 << 32  # flags have 32 bits: numbers in them begin again at 0


def copy_async(target: int, source: int, nbytes: int, stream: int) -> None:
    """Enqueues a copy between addresses of this process, of any GPUs that it can reach."""
    checked(driver_bindings().cuMemcpyAsync(target, source, nbytes, stream), f"copying {nbytes} bytes")


def wait_until(address: int, value: int, stream: int) -> None:
    """Lets a stream of the current device wait until the 32 bits at an address have reached `value`, in a circle."""
    reached = driver_bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    _enqueue([_wait(address, value, reached)], stream, "waiting for a flag")


class FlagWrites:
    """32 bits written to each of some addresses, in their order."""

    def __init__(self, addresses: Sequence[int], value: int) -> None:
        self._operations = [_write(address, value) for address in addresses]

    def enqueue(self, stream: int) -> None:
        """On a stream of the current device, behind all that the stream has done before."""
        _enqueue(self._operations, stream, "writing flags")


class FlagWaits:
    """Flags at some addresses, in this GPU's memory, that others raise: a stream waits for all, and lowers them again.

    Each is 32 bits and 0 at first, 1 when it is raised; nobody raises it again before it is lowered.
    """

    def __init__(self, addresses: Sequence[int]) -> None:
        self._operations = _awaited(addresses)

    def enqueue(self, stream: int) -> None:
        """On a stream of the current device."""
        _enqueue(self._operations, stream, "waiting for another GPU")


class Meeting:
    """A point that streams of several GPUs reach together, without a kernel: each raises a flag at every other.

    mine: addresses of the flags that others raise, in this GPU's memory; theirs: of those that this one raises. Each is
    32 bits and 0 at first. They are lowered again before anybody goes on, so that a meeting can be had over and over,
    also by graphs; but between two of one kind every stream must have had another meeting.
    """

    def __init__(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        self._operations = [*(_write(address, 1) for address in theirs), *_awaited(mine)]

    def enqueue(self, stream: int) -> None:
        """On a stream of the current device. What it has done before is visible to all, once they go on."""
        _enqueue(self._operations, stream, "waiting for other GPUs")


def _enqueue(operations: Sequence[Any], stream: int, doing: str) -> None:
    checked(driver_bindings().cuStreamBatchMemOp(stream, len(operations), operations, 0), doing)


def _awaited(flags: Sequence[int]) -> list[Any]:
    equal = driver_bindings().CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ
    return [operation for flag in flags for operation in (_wait(flag, 1, equal), _write(flag, 0))]


def _write(address: int, value: int) -> Any:
    driver = driver_bindings()
    made = driver.CUstreamBatchMemOpParams()
    made.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
    made.writeValue.operation = made.operation
    made.writeValue.address, made.writeValue.value = driver.CUdeviceptr(address), value
    made.writeValue.flags = 0  # whatever the stream has done before is visible first
    return made


def _wait(address: int, value: int, comparison: Any) -> Any:
    driver = driver_bindings()
    made = driver.CUstreamBatchMemOpParams()
    made.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
    made.waitValue.operation = made.operation
    made.waitValue.address, made.waitValue.value = driver.CUdeviceptr(address), value
    made.waitValue.flags = int(comparison)
    return made
