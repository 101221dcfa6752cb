"""WorkQueue: a native worker thread that runs each job once a number in memory has been reached."""

from __future__ import annotations

import os
import weakref

from torch import Tensor

from fastattention.backends.cpu.library import Library, load_library


class WorkQueue:
    """Jobs, one after another: each begins once `ready` has reached its number, which `done` has when it is over.

    ready, done: tensors on the CPU whose first 32 bits these numbers are, equal at first. They count modulo 2**32: of
    two numbers that are less than 2**31 apart the later is the larger. While a job waits, its thread is busy.
    """

    def __init__(self, ready: Tensor, done: Tensor) -> None:
        """Raises MemoryError when there can be no further thread."""
        self._library = load_library()
        self._handle = self._library.start_queue(ready.data_ptr(), done.data_ptr())
        self._end = weakref.finalize(self, _end, self._library, self._handle, os.getpid(), (ready, done))
        self._end.atexit = False  # threads end anyway

    def push(self, number: int, function: int, argument: int) -> None:
        """A job: the C function `void (void*)` at address `function`, with its argument. Raises MemoryError."""
        self._library.push(self._handle, number, function, argument)

    @property
    def newest(self) -> int:
        """The number of the newest job, 0 before the first."""
        return self._library.newest(self._handle)

    def end(self) -> None:
        """Waits for the job under way; others are dropped, and count as done. The queue is of no more use."""
        self._end()


def _end(library: Library, handle: int, process: int, numbers: tuple[Tensor, Tensor]) -> None:
    """The numbers stay until here. A forked process has no such thread."""
    if os.getpid() == process:
        library.end_queue(handle)
