"""Values of index tensors on the host: constant tensors are read from their device once.

Some operators take lengths as lists. Reading a tensor waits for its device, and all layers of a model get the same
tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_constant = WeakTensorKeyDictionary()  # -> the values as a list, or None where they have not been read yet


def constant(tensor: Tensor, numbers: list[int] | None = None) -> Tensor:
    """The given 1-D tensor, marked as constant: the caller promises that it is never written from now on.

    numbers: its values, if the caller knows them without reading it.
    """
    if not torch.compiler.is_compiling():  # a compiled step has another tensor each time
        _constant[tensor] = numbers
    return tensor


def read_numbers(tensor: Tensor) -> list[int]:
    """The values of a 1-D tensor. Waits for its device; for a constant tensor only the first time."""
    numbers: list[int] | None = _constant.get(tensor)  # type: ignore[no-untyped-call]
    if numbers is None:
        numbers = tensor.tolist()
        if tensor in _constant:
            _constant[tensor] = numbers
    return list(numbers)
