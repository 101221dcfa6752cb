"""Functions of Python as C has them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


class Callback:
    """The C function `void (void*)` at `address`, which calls a function of Python as long as this object stays."""

    def __init__(self, function: Callable[[int | None], object]) -> None:
        self._kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
        self.address = ctypes.cast(self._kept, ctypes.c_void_p).value or 0
