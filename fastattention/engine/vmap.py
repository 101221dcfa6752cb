"""torch.vmap over operators of torch: the mapped axis joins the batch where it can.

Other calls run once for each index of that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fastattention.engine.operator import AnyOperator

Dims = Sequence[int | None]  # the mapped axis of each argument; None where there is none


def map_forward(operator: AnyOperator, info: Any, in_dims: Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """The rule of an operator, in the form that torch.library.register_vmap asks for."""
    named, dims = operator.by_name(arguments), operator.by_name(in_dims)
    operator.check_mapped(named, dims)
    run = getattr(torch.ops.fastattention, operator.name)
    alone = any(dim is not None and name not in operator.batched for name, dim in dims.items())
    if alone or operator.runs_one_by_one(named):
        return _one_by_one(run, info.batch_size, in_dims, arguments)
    size, optional = info.batch_size, operator.given._field_defaults
    for name in operator.batched.keys() - optional.keys():
        named[name] = _fold(named[name], dims[name], size)
    batch_size = named[operator.tensors[0]].shape[0] // size
    for name in operator.batched.keys() & optional.keys():  # they may lack the batch, and broadcast to it
        if named[name] is not None:
            named[name] = _fold_broadcast(named[name], dims[name], size, batch_size, operator.batched[name])
    results = all_of(run(*named.values()))
    asked = [x.dim() > 1 for x in results]  # an empty tensor stands for a result that was not asked for
    unfolded = tuple(x.unflatten(0, (size, batch_size)) if kept else x for x, kept in zip(results, asked, strict=True))
    out_dims = tuple(0 if kept else None for kept in asked)
    return (unfolded, out_dims) if len(out_dims) > 1 else (unfolded[0], out_dims[0])


def map_backward(operator: AnyOperator, info: Any, in_dims: Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """The rule of an operator's backward."""
    run = getattr(torch.ops.fastattention, f"{operator.name}_backward")
    return _one_by_one(run, info.batch_size, in_dims, arguments)


def all_of(returned: Any) -> Sequence[Any]:
    """The results of an operator of torch, which returns a single one alone."""
    return (returned,) if isinstance(returned, Tensor) else returned


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped axis and the batch as one axis."""
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _fold_broadcast(tensor: Tensor, dim: int | None, size: int, batch_size: int, rank: int) -> Tensor:
    """The same for a tensor that may lack leading axes, or the batch, which it then broadcasts to."""
    if dim is None and (tensor.dim() < rank or tensor.shape[0] == 1):
        return tensor
    mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    full = mapped.reshape(size, *(1,) * (rank + 1 - mapped.dim()), *mapped.shape[1:])
    return full.expand(size, batch_size, *full.shape[2:]).flatten(0, 1)


def _one_by_one(operator: Callable[..., Any], size: int, in_dims: Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """Runs the operator for each index of the mapped axis and stacks what it returns."""
    results = [
        operator(*(x if dim is None else x.select(dim, index) for x, dim in zip(arguments, in_dims, strict=True)))
        for index in range(size)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
    returned, dims = type(results[0]), [0] * len(stacked)
    return returned(stacked), returned(dims)
