"""Records which operators of torch_npu were called, with which arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Recorded(NamedTuple):
    """One call of an operator."""

    operator: Any
    arguments: dict[str, Any]  # by the names of the real schema
    results: tuple[Any, ...]

    @property
    def mapping(self) -> tuple[str, str, int, str]:
        """(operator, layout, sparse_mode, other distinctions), to be compared as sets."""
        given = self.arguments
        told = {
            "int8": given["key"].dtype is torch.int8,
            "pages": given.get("block_table") is not None,
            "one query": given["query"].dim() == 4 and given["query"].shape[given["input_layout"].index("S")] == 1,
            "sinks": given.get("sink") is not None,
            "corrected": given.get("inner_precise", 0) == 2,
            "own mask": given.get("atten_mask") is not None and given.get("sparse_mode", 0) == 0,
        }
        rest = ", ".join(name for name, is_so in told.items() if is_so)
        return (self.name, given["input_layout"], given.get("sparse_mode", 0), rest)

    @property
    def name(self) -> str:
        return str(self.operator._schema.name.removeprefix("npu::"))


class Recorder(TorchDispatchMode):
    """While active, notes every call of an operator of torch_npu."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "npu":  # type: ignore[attr-defined]  # of an operator
            names = [argument.name for argument in func._schema.arguments]  # type: ignore[attr-defined]
            given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
            self.calls.append(Recorded(func, given, results))
        return results


def on_meta(value: Any) -> Any:
    """The same argument on the meta device, without values."""
    return value.to("meta") if isinstance(value, Tensor) else value


def shapes(results: tuple[Any, ...]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and shapes of result tensors, without reserved ones, which have no elements."""
    return [(each.dtype, tuple(each.shape)) for each in results if isinstance(each, Tensor) and each.numel()]
