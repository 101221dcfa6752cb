"""WorkQueue: a native worker thread that runs each job once a counter in memory has reached the job's number."""

from __future__ import annotations

import os
import weakref

from torch import Tensor

from fastattention.backends.cpu.library import Library, load_library


class WorkQueue:
    """Runs jobs in order. Each begins once `ready` has reached its number; the thread then sets `done` to that number.

    ready, done: tensors on the CPU whose first 32 bits are these counters, equal at first. They count modulo 2**32, so
    they are compared by their difference, which must be less than 2**31. The thread spins while a job waits.
    """

    def __init__(self, ready: Tensor, done: Tensor) -> None:
        """Starts the thread. Raises MemoryError when the system allows no further thread."""
        self._library = load_library()
        self._handle = self._library.start_queue(ready.data_ptr(), done.data_ptr())
        self._end = weakref.finalize(self, _end, self._library, self._handle, os.getpid(), (ready, done))
        self._end.atexit = False  # threads end with the process anyway

    def push(self, number: int, function: int, argument: int) -> None:
        """Queues a call of the C function `void (void*)` at address `function`. Raises MemoryError."""
        self._library.push(self._handle, number, function, argument)

    @property
    def newest(self) -> int:
        """The number of the newest job, 0 before the first."""
        return self._library.newest(self._handle)

    def end(self) -> None:
        """Ends the thread: waits for the running job and drops the others, which count as done."""
        self._end()


def _end(library: Library, handle: int, process: int, numbers: tuple[Tensor, Tensor]) -> None:
    """The finalizer keeps the counters alive until now. A forked process does not have the thread."""
    if os.getpid() == process:
        library.end_queue(handle)
