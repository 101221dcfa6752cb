"""The signature of a call: everything that validation and kernels read, except addresses and values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from fastattention.engine.bounded import BoundedDict
from fastattention.engine.eager import PLAIN_TYPES, is_traced, transform_level

CallSignature = tuple[object, ...]


def signature_of(tensors: Sequence[Any], backend: object, scalars: Hashable) -> CallSignature | None:
    """Shapes, strides, dtypes and devices of tensors, whether autograd records them, and all scalars.

    None while a tracer or transform follows the call (`runs_eagerly`), and unless all tensors are plain and hold data.
    scalars: after validation of their types, since 1 == 1.0 == True
    """
    if (
        type(backend) is not str
        or is_traced()
        or transform_level() is not None
        or forward_ad._current_level >= 0
        or getattr(tensors[0], "is_meta", False)
    ):  # fmt: skip
        return None
    records = torch.is_grad_enabled()
    signature: list[object] = [backend, scalars]
    try:
        for tensor in tensors:
            if tensor is None:
                signature.append(None)
            elif type(tensor) in PLAIN_TYPES and not tensor.is_neg():
                grad = records and tensor.requires_grad
                signature.append((tensor.shape, tensor.stride(), tensor.dtype, tensor.device, grad))
            else:
                return None
    except RuntimeError:  # some tensor has no shape or strides; validation names it
        return None
    return tuple(signature)


class CheckedOnce:
    """A check of arguments that runs once for all calls with the same signature."""

    def __init__(self, check: Callable[..., None]) -> None:
        """check: takes all tensors, then all scalars; raises for wrong ones."""
        self._check = check
        self._passed: BoundedDict[CallSignature, None] = BoundedDict()

    def __call__(self, tensors: Sequence[Any], *scalars: Hashable) -> None:
        """Raises unless they pass. scalars: after validation of their types."""
        signature = signature_of(tensors, "", scalars)
        if signature is not None and signature in self._passed:
            return
        self._check(*tensors, *scalars)
        if signature is not None:
            self._passed[signature] = None
