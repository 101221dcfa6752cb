"""PreparedCall: attention that is set up now and run later by any thread, without the GIL."""

from __future__ import annotations

import weakref
from typing import Any

from fastattention.backends.cpu.library import load_library
from fastattention.backends.cpu.params import AttentionParams


class PreparedCall:
    """A call of the native library: whoever calls the C function at address `function` with `argument` runs it.

    needs: what must stay in memory until it has run, and stays as long as this object

    Prepared calls run one at a time. Raises MemoryError when it cannot be made.
    """

    def __init__(self, params: AttentionParams, needs: Any) -> None:
        self._library, self._needs = load_library(), needs
        self.function = self._library.run_address
        self.argument = self._library.prepare(params)
        # At exit the process gives back its memory anyway, and somebody may still run the call.
        weakref.finalize(self, self._library.release, self.argument).atexit = False

    def run(self) -> None:
        """In this thread. Raises MemoryError when working memory runs out."""
        self._library.run(self.argument)
        self.check()

    def check(self) -> None:
        """Once it has run: raises MemoryError when working memory ran out; its results are NaN then."""
        if self._library.failed(self.argument):
            raise MemoryError("fastattention could not get memory to attend on the CPU")
