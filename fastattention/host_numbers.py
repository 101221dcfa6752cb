"""Numbers of index tensors on the host: those that never change are read from their device once.

Some operators take lengths as lists. Reading a tensor waits for its device, and all layers of a model get the same one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_constant = WeakTensorKeyDictionary()  # to the numbers as a list, or None where nobody has read them yet


def constant(tensor: Tensor, numbers: list[int] | None = None) -> Tensor:
    """The tensor itself, of one dimension. The caller promises that nobody writes it from now on.

    numbers: what it holds, if the caller knows without reading it.
    """
    if not torch.compiler.is_compiling():  # a compiled step has another tensor each time
        _constant[tensor] = numbers
    return tensor


def read_numbers(tensor: Tensor) -> list[int]:
    """The numbers of a tensor of one dimension. Waits for its device, of a constant one only the first time."""
    numbers: list[int] | None = _constant.get(tensor)  # type: ignore[no-untyped-call]
    if numbers is None:
        numbers = tensor.tolist()
        if tensor in _constant:
            _constant[tensor] = numbers
    return list(numbers)
