"""PreparedCall: attention that is set up now and run later by any thread, without the GIL."""

from __future__ import annotations

import weakref
from typing import Any

from fastattention.backends.common.c_struct import Params
from fastattention.backends.cpu.library import load_library


class PreparedCall:
    """A call of the native library that runs when the C function at address `function` is called with `argument`.

    needs: what must stay in memory until the call has run; this object keeps it alive

    Prepared calls run one at a time. Raises MemoryError when there is no memory for the call.
    """

    def __init__(self, params: Params, needs: Any) -> None:
        self._library, self._needs = load_library(), needs
        self.function = self._library.run_address
        self.argument = self._library.prepare(params)
        # The call is not freed at exit: another thread may still run it, and the process frees its memory anyway.
        weakref.finalize(self, self._library.release, self.argument).atexit = False

    def run(self) -> None:
        """Runs the call in this thread. Raises MemoryError when working memory runs out."""
        self._library.run(self.argument)
        self.check()

    def check(self) -> None:
        """Raises MemoryError if working memory ran out when the call was run; its results are NaN then."""
        if self._library.failed(self.argument):
            raise MemoryError("fastattention could not get memory to attend on the CPU")
