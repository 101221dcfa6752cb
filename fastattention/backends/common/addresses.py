"""Addresses of the tensors of a call, in the order in which a kernel's parameters hold them."""

from __future__ import annotations

import ctypes
import operator

from fastattention.attention.problem import Inputs
from fastattention.backends.common.layout import null_of


class Addresses:
    """How the addresses of calls are taken from their tensors. `given` names the tensors."""

    def __init__(self, params: type[ctypes.Structure], inputs: Inputs) -> None:
        """Takes the addresses of calls that have the same fields of Inputs as `inputs`."""
        pointers = [field[0] for field in params._fields_ if field[1] is ctypes.c_void_p]
        tensors = [name for name in pointers if name in Inputs._fields]
        self.given = tuple(name for name in tensors if getattr(inputs, name) is not None)
        self._tensors = operator.attrgetter(*self.given)

    def of(self, inputs: Inputs) -> list[int]:
        """The addresses, in order. Raises RuntimeError for a tensor without memory."""
        return [tensor.data_ptr() or null_of(tensor) for tensor in self._tensors(inputs)]
