"""CpuStream: runs functions on the CPU in the order of a CUDA stream."""

from __future__ import annotations

import weakref

import torch

from fastattention.backends.cpu.work_queue import WorkQueue
from fastattention.gpu_runtime.streams import U32_MODULUS, stream_wait_value32, stream_write_value32

_LINE = 16  # numbers of 32 bits: no two flags in one cache line


class CpuStream:
    """The GPU writes a number when the CPU may begin, and waits for one that the CPU writes when it is done.

    Both lie in pinned memory. A call of the host by the driver does the same, 0.1 to 0.2 milliseconds later.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ready, done = torch.zeros(2, _LINE, dtype=torch.int32, device="cpu").pin_memory()
        self._ready, self._done = ready.data_ptr(), done.data_ptr()
        self._queue = WorkQueue(ready, done)
        self._number = 0
        weakref.finalize(self, _end, self._queue, self.stream, done).atexit = False

    def enqueue(self, function: int, argument: int) -> None:
        """The C function `void (void*)` at address `function` runs when the stream is there; `wait` must follow.

        Raises MemoryError.
        """
        # Numbers are not used twice: were one written by a call that was interrupted, its next job would not wait.
        self._number = (self._number + 1) % U32_MODULUS
        stream_write_value32(self._ready, self._number, self.stream.cuda_stream)
        self._queue.push(self._number, function, argument)

    def wait(self) -> None:
        """The stream goes on when all functions have returned, also that of an `enqueue` which was interrupted."""
        stream_wait_value32(self._done, self._queue.newest, self.stream.cuda_stream)


def _end(queue: WorkQueue, stream: torch.cuda.Stream, done: torch.Tensor) -> None:
    """The stream may still wait for `done`, which stays until here."""
    queue.end()
    stream.synchronize()
