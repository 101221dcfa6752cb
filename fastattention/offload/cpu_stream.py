"""CpuStream: runs functions on the CPU in the order of a CUDA stream."""

from __future__ import annotations

import weakref

import torch

from fastattention.backends.cpu.work_queue import WorkQueue
from fastattention.gpu_runtime.streams import U32_MODULUS, stream_wait_value32, stream_write_value32

_LINE = 16  # 32-bit words of a cache line, so that no two flags share one


class CpuStream:
    """The stream signals a worker thread by a number in pinned memory, and waits for a number that it writes back.

    A host callback of the driver would take 0.1 to 0.2 ms longer.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ready, done = torch.zeros(2, _LINE, dtype=torch.int32, device="cpu").pin_memory()
        self._ready, self._done = ready.data_ptr(), done.data_ptr()
        self._queue = WorkQueue(ready, done)
        self._number = 0
        weakref.finalize(self, _end, self._queue, self.stream, done).atexit = False

    def enqueue(self, function: int, argument: int) -> None:
        """Runs the C function `void (void*)` at `function` when the stream reaches this point; `wait` must follow.

        Raises MemoryError.
        """
        # No number is used twice: if an interrupted call had written it, the next job with it would not wait.
        self._number = (self._number + 1) % U32_MODULUS
        stream_write_value32(self._ready, self._number, self.stream.cuda_stream)
        self._queue.push(self._number, function, argument)

    def wait(self) -> None:
        """The stream waits until all functions have returned, also that of an interrupted `enqueue`."""
        stream_wait_value32(self._done, self._queue.newest, self.stream.cuda_stream)


def _end(queue: WorkQueue, stream: torch.cuda.Stream, done: torch.Tensor) -> None:
    """Ends the queue. The stream may still wait for `done`, which the argument keeps alive."""
    queue.end()
    stream.synchronize()
