"""torch.vmap over operators of torch: the mapped axis joins another one where it can, such as the batch.

Other calls run once for each index of that axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fastattention.engine.offsets import join_offsets

if TYPE_CHECKING:
    from fastattention.engine.operator import AnyOperator

Dims = Sequence[int | None]  # the mapped axis of each argument; None where there is none


def map_forward(operator: AnyOperator, info: Any, in_dims: Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """The rule of an operator, in the form that torch.library.register_vmap asks for."""
    named, dims = operator.by_name(arguments), operator.by_name(in_dims)
    operator.check_mapped(named, dims)
    run, size = getattr(torch.ops.fastattention, operator.name), info.batch_size
    axes = operator.joined_axes(named, {name for name, dim in dims.items() if dim is not None})
    joined = None if axes is None else _join_all(operator, named, dims, axes, size)
    if axes is None or joined is None:
        return _one_by_one(run, size, in_dims, arguments)
    results = all_of(run(*joined.values()))
    # An empty tensor stands for a result that was not asked for.
    out_dims = tuple(axes[name] if x.dim() > 1 else None for name, x in zip(operator.results, results, strict=True))
    taken = tuple(x if dim is None else _take_apart(x, dim, size) for x, dim in zip(results, out_dims, strict=True))
    return (taken, out_dims) if len(out_dims) > 1 else (taken[0], out_dims[0])


def map_backward(operator: AnyOperator, info: Any, in_dims: Dims, arguments: Sequence[Any]) -> tuple[Any, Any]:
    """The rule of an operator's backward."""
    run = getattr(torch.ops.fastattention, f"{operator.name}_backward")
    return _one_by_one(run, info.batch_size, in_dims, arguments)


def all_of(returned: Any) -> Sequence[Any]:
    """The results of an operator of torch, which returns a single one alone."""
    return (returned,) if isinstance(returned, Tensor) else returned


def _join_all(
    operator: AnyOperator, named: Mapping[str, Any], dims: Mapping[str, int | None], axes: Mapping[str, int], size: int
) -> dict[str, Any] | None:
    """The arguments of one call for all indices; None where a mapped tensor does not join, or one lacks its axis."""
    if any(dim is not None and name not in axes for name, dim in dims.items()):
        return None
    rows = {name: _rows(named[name], dims[name], size) for name in axes if isinstance(named.get(name), Tensor)}
    if any(x.dim() != 2 if name in operator.offsets else x.dim() < 2 + axes[name] for name, x in rows.items()):
        return None  # validation of the first index says so
    first = operator.tensors[0]
    length = rows[first].shape[1 + axes[first]]  # of one index, along the axis that is joined
    joined = dict(named)
    for name, x in rows.items():
        if name in operator.offsets:
            joined[name] = join_offsets(x, length)
        elif name not in operator.broadcast:
            joined[name] = _join(x, axes[name])
        elif dims[name] is not None or (x.dim() > operator.broadcast[name] and x.shape[1] != 1):
            joined[name] = _join_broadcast(x, length, operator.broadcast[name])
    return joined


def _rows(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The tensor of each index, one after the other."""
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _join(rows: Tensor, axis: int) -> Tensor:
    """Joins the mapped axis, the first one, with an axis of the tensors of indices."""
    return rows.movedim(0, axis).flatten(axis, axis + 1)


def _take_apart(joined: Tensor, axis: int, size: int) -> Tensor:
    """The mapped axis of a result, in front of the axis that it had joined."""
    return joined.view(*joined.shape[:axis], size, joined.shape[axis] // size, *joined.shape[axis + 1 :])


def _join_broadcast(rows: Tensor, batch_size: int, rank: int) -> Tensor:
    """Joins with the batch tensors that may lack leading axes, or the batch, which they then broadcast to."""
    full = rows.reshape(rows.shape[0], *(1,) * (rank + 1 - rows.dim()), *rows.shape[1:])
    return _join(full.expand(full.shape[0], batch_size, *full.shape[2:]), 0)


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
