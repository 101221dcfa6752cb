"""Python functions as C function pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any


class Callback:
    """The C function at `address`, by default `void (void*)`, which calls a Python function while this object lives."""

    def __init__(
        self, function: Callable[..., Any], result: type | None = None, arguments: Sequence[type] = (ctypes.c_void_p,)
    ) -> None:
        self._kept = ctypes.CFUNCTYPE(result, *arguments)(function)
        self.address = ctypes.cast(self._kept, ctypes.c_void_p).value or 0
