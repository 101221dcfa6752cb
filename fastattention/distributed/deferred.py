"""Attention that waits for its projection, so that the two can be computed, and summed over ranks, in row blocks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fastattention.attention.interface import fast_attn_func, fast_attn_with_kvcache
from fastattention.distributed.attention_out_proj import (
    attention_out_proj_allreduce,
    attention_out_proj_allreduce_with_kvcache,
)
from fastattention.engine.checks import needs_grad
from fastattention.errors import ArgumentError


class DeferredAttention:
    """A call of attention that has not been made. It replaces the output tensor.

    A projection under `TilingAllReduce` makes the call in row blocks. Any other use, by a function of torch or numpy, a
    method or an operator, gets the tensor, computed then. `flatten(2)`, `reshape` or `view` to (batch_size, seqlen_q,
    nheads * headdim_v), the shape that projections take, keep it deferred. The tensors of the call must not change
    before it is made.
    """

    def __init__(
        self,
        attend: Callable[[], Tensor],
        shape: torch.Size,
        tiled: Callable[..., Tensor] | str,
        tensors: Sequence[Tensor],
    ) -> None:
        """Defers `attend`, which returns (batch_size, seqlen_q, nheads, headdim_v).

        - `shape`: the shape that it stands for, this one or (batch_size, seqlen_q, nheads * headdim_v)
        - `tiled`: the call with its projection, a function of (weight, bias, group=, partition=, transport=); or why
          there is none
        - `tensors`: arguments that may need gradients, all in the dtype of out
        """
        self._attend, self.shape, self._tiled, self._tensors = attend, shape, tiled, tensors

    dtype = property(lambda self: self._tensors[0].dtype)
    device = property(lambda self: self._tensors[0].device)

    @property
    def num_rows(self) -> int:
        """batch_size * seqlen_q."""
        return self.shape[0] * self.shape[1]

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> DeferredAttention | Tensor:
        """Stays deferred when only heads are flattened; otherwise computes the tensor."""
        if start_dim in (2, -2) and end_dim in (3, -1) and len(self.shape) == 4:
            return self._reshaped((*self.shape[:2], -1))
        return self.compute().flatten(start_dim, end_dim)

    def reshape(self, *shape: Any) -> DeferredAttention | Tensor:
        """Stays deferred when only heads are flattened; otherwise computes the tensor."""
        return self._reshaped(shape if isinstance(shape[0], int) else tuple(shape[0]))

    view = reshape

    def contiguous(self) -> DeferredAttention:
        """Itself."""
        return self

    def _reshaped(self, shape: tuple[int, ...]) -> DeferredAttention | Tensor:
        flat = (*self.shape[:2], self.shape[2:].numel())
        if len(shape) == 3 and all(given in (-1, size) for given, size in zip(shape, flat, strict=True)):
            return DeferredAttention(self._attend, torch.Size(flat), self._tiled, self._tensors)
        return self.compute().reshape(shape)

    def compute(self) -> Tensor:
        """The tensor, computed anew in every call."""
        return self._attend().reshape(self.shape)

    def why_not_tiled(self, weight: Tensor, bias: Tensor | None) -> str | None:
        """Why `project` cannot serve a weight and bias, or None. For wrong arguments `project` raises instead."""
        if isinstance(self._tiled, str):
            return self._tiled
        if needs_grad(*self._tensors, weight, bias):
            return "gradients are wanted, which row blocks do not give; compute under torch.no_grad()"
        if weight.dtype != self.dtype:
            return f"the projection's weight is {weight.dtype} and attention's output {self.dtype}"
        return None

    def project(self, weight: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
        """attention_out_proj_allreduce of the call: (batch_size, seqlen_q, hidden).

        - `weight`: (hidden, nheads * headdim_v), this rank's columns
        - `bias`: (hidden,), added once
        - `how`: group, partition and transport of attention_out_proj_allreduce
        """
        assert not isinstance(self._tiled, str)
        return self._tiled(weight, bias, **how)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy, pickle and others ask every object for these
            raise AttributeError(name)
        return getattr(self.compute(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.compute()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        return self.compute().__array__(*arguments, **options)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.compute, (args, kwargs or {}))
        return function(*args, **kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def of_tensor(self: DeferredAttention, *others: Any) -> Any:
        return getattr(self.compute(), name)(*others)

    of_tensor.__name__ = name
    return of_tensor


# Python looks these up in the class, not by __getattr__. In-place operators are not defined: they give a tensor.
for _name in (
    "add sub mul truediv floordiv mod pow matmul radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul "
    "neg pos abs invert lt le gt ge eq ne and or xor bool float int"
).split():
    setattr(DeferredAttention, f"__{_name}__", _operator(f"__{_name}__"))


def deferred_attn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> DeferredAttention:
    """`fast_attn_func`, deferred until its projection.

    - `q`, `k`, `v`: as in `fast_attn_func`: the heads of this rank
    - `options`: softmax_scale, causal, window_size, softcap, alibi_slopes, attn_bias, sinks and backend, as there

    Raises ArgumentError for other options. Wrong tensors raise when the call is made.
    """
    return _deferred(fast_attn_func, attention_out_proj_allreduce, (q, k, v), options)


def deferred_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> DeferredAttention:
    """`fast_attn_with_kvcache`, deferred until its projection. The caches already hold the tokens of q.

    - `q`, `k_cache`, `v_cache`: as in `fast_attn_with_kvcache`: the heads of this rank
    - `options`: those of `deferred_attn`, and cache_seqlens, cache_batch_idx, cache_leftpad, block_table, k_scale and
        v_scale

    Raises ArgumentError for other options. Wrong tensors raise when the call is made.
    """
    caches = (k_cache, v_cache)
    return _deferred(fast_attn_with_kvcache, attention_out_proj_allreduce_with_kvcache, (q, *caches), options)


def _deferred(
    attend: Callable[..., Any], tiled: Callable[..., Tensor], tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> DeferredAttention:
    known = _shared_options(attend, tiled)
    for name in options:
        if name not in known:
            raise ArgumentError(f"{name} is no option of deferred attention; known are {', '.join(known)}")
    q, _, v = tensors
    return DeferredAttention(
        functools.partial(attend, *tensors, **options),
        torch.Size((*q.shape[:-1], v.shape[-1])),
        functools.partial(tiled, *tensors, **options),
        tensors,
    )


@functools.cache
def _shared_options(*functions: Callable[..., Any]) -> list[str]:
    """Names of the keyword arguments that all functions have, besides q, keys and values."""
    first, *others = (inspect.signature(function).parameters for function in functions)
    return [name for name in first if all(name in other for other in others)][3:]
