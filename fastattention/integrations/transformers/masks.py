"""Masks of Transformers models, as arguments of fastattention's functions where possible, not as matrices.

Transformers makes one mask a forward pass and hands it to the attention function of every layer. The masks here carry
all that this function needs (causal, window, padding, lengths): it never guesses, and nothing is derived again in each
layer.

SequenceMask
├── DenseMask    no padding: fast_attn_func on the keys in use
├── CachedMask   few queries, many keys: fast_attn_with_kvcache on the keys in place, without copies
└── VarlenMask   padding or variable-length sequences: fast_attn_varlen_func on the real tokens alone

A pattern that none of them can express stays a tensor, (batch_size, 1, seqlen_q, seqlen_k). It becomes an attn_bias, or
a mask of single pairs (integrations/pair_masks.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fastattention.attention.interface import fast_attn_func, fast_attn_varlen_func, fast_attn_with_kvcache
from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.sparse import PairMask

AnyMask = TypeVar("AnyMask", bound="SequenceMask")
Window = tuple[int, int]  # keys seen to the left and to the right, -1 unlimited
Tokens = tuple[Tensor, Tensor]  # row of the batch and index in the row of each token, int64


_WITHOUT_HEADS = (slice(None), 0, slice(None), slice(None))  # what models give their indexers of a mask

_NOT_A_TENSOR = (
    "this model computes with its attention mask instead of handing it to the attention function; "
    "load it with attn_implementation='sdpa' or 'eager'"
)


class NoAttributeError(UnsupportedError, AttributeError):
    """Raised for an attribute that a tensor has and a mask lacks. `hasattr` gives False."""


class Functions(NamedTuple):
    """The functions that compute a layer, with the arguments of these."""

    dense: Callable[..., Any] = fast_attn_func
    varlen: Callable[..., Any] = fast_attn_varlen_func
    kvcache: Callable[..., Any] = fast_attn_with_kvcache


AT_ONCE = Functions()


class Scores(NamedTuple):
    """How a layer turns scores into weights under any mask, and by which functions."""

    softmax_scale: float | None  # None is headdim ** -0.5
    softcap: float  # 0 is off
    sinks: Tensor | None  # (nheads,)
    dropout_p: float
    functions: Functions = AT_ONCE


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceMask:
    """The mask of a forward pass: which keys its queries see.

    Query i is key num_keys - seqlen_q + i: causal and window are aligned to the bottom right of the keys in use.
    """

    shape: tuple[int, int, int, int]  # (batch_size, 1, seqlen_q, seqlen_k) of the matrix it stands for
    causal: bool
    window: Window
    as_tensor: Callable[[], Tensor]  # makes that matrix: bool, True where a query sees a key

    @property
    def ndim(self) -> int:
        """Four, as that matrix has: Transformers takes masks of two dimensions for padding masks."""
        return len(self.shape)

    def contiguous(self: AnyMask) -> AnyMask:
        """The mask itself: `generate` calls this on every mask."""
        return self

    def to(self: AnyMask, device: torch.device | str | int, **_: Any) -> AnyMask:
        """The mask with its tensors on `device`: models spread over devices move the arguments of their layers."""
        moved = {field.name: _moved(getattr(self, field.name), device) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{**moved, "as_tensor": lambda: self.as_tensor().to(device)})

    def __getattr__(self, name: str) -> Any:
        raise NoAttributeError(f"{type(self).__name__} of fast_attention has no {name!r}: {_NOT_A_TENSOR}")

    def __getitem__(self: AnyMask, index: object) -> AnyMask:
        if index == _WITHOUT_HEADS:
            return self
        raise UnsupportedError(f"{type(self).__name__} of fast_attention cannot be indexed: {_NOT_A_TENSOR}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Tensor:
        name = getattr(function, "__name__", function)
        raise UnsupportedError(f"{cls.__name__} of fast_attention is no argument of torch's {name}: {_NOT_A_TENSOR}")

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        """Attention of one layer under this mask.

        q: (batch_size, seqlen_q, nheads, headdim); k, v: (batch_size, seqlen_k, nheads_k, headdim or headdim_v)
        bias: broadcasts to (batch_size, nheads, seqlen_q, seqlen_k), or None
        A mask whose matrix broadcasts to another batch_size, seqlen_q or seqlen_k does so, as in eager attention.
        Returns (batch_size, seqlen_q, nheads, headdim_v); rows of padding hold 0 or meaningless values.
        """
        given = (q.shape[0], 1, q.shape[1], k.shape[1])
        if given != self.shape:
            if all(mine in (1, length) for mine, length in zip(self.shape, given, strict=True)):
                return self._attend_as_tensor(q, k, v, bias, scores)  # its matrix broadcasts
            raise ArgumentError(f"the mask is for (batch_size, 1, seqlen_q, seqlen_k) = {self.shape}, got {given}")
        return self._attend(q, k, v, bias, scores)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        raise NotImplementedError

    def _attend_as_tensor(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        return attend_dense(q, k, v, combine(self.as_tensor(), bias, q.dtype), scores)


@dataclasses.dataclass(frozen=True, eq=False)
class SelectedKeys(SequenceMask):
    """Each query sees the keys of its indices, and no others."""

    indices: Tensor  # int32 (batch_size, seqlen_q, topk), -1 after the others

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        return self._attend_as_tensor(q, k, v, bias, scores)


def matrix_of(indices: Tensor, seqlen_k: int) -> Tensor:
    """True at the indices (batch_size, seqlen_q, topk) of each query: bool (batch_size, 1, seqlen_q, seqlen_k)."""
    columns = torch.where(indices < 0, seqlen_k, indices).long()
    seen = indices.new_zeros((*indices.shape[:2], seqlen_k + 1), dtype=torch.bool).scatter(-1, columns, True)
    return seen[:, None, :, :-1]


@dataclasses.dataclass(frozen=True, eq=False)
class DenseMask(SequenceMask):
    """All sequences use the first num_keys keys. Any others are free places of a static cache."""

    num_keys: int

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        if self.num_keys != k.shape[1]:
            k, v = k[:, : self.num_keys], v[:, : self.num_keys]
            bias = bias if bias is None or bias.shape[-1] == 1 else bias[..., : self.num_keys]
        return attend_dense(q, k, v, bias, scores, self.causal, self.window)


@dataclasses.dataclass(frozen=True, eq=False)
class CachedMask(SequenceMask):
    """Sequence b uses the keys cache_leftpad[b] to cache_seqlens[b] - 1, read in place. It has no gradients."""

    cache_seqlens: Tensor  # int32 (batch_size,)
    cache_leftpad: Tensor | None  # int32 (batch_size,)
    reaches_end: bool  # whether every sequence uses the last key
    order: Tensor | None = None  # int64 (batch_size, seqlen_k): keys are copied in this order first

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        if bias is not None or scores.dropout_p:
            return self._attend_as_tensor(q, k, v, bias, scores)
        if self.order is not None:
            k, v = (x.take_along_dim(self.order[:, :, None, None], dim=1) for x in (k, v))
        out: Tensor = scores.functions.kvcache(
            q, k, v, cache_seqlens=self.cache_seqlens, cache_leftpad=self.cache_leftpad,
            softmax_scale=scores.softmax_scale, causal=self.causal, window_size=self.window, softcap=scores.softcap,
            sinks=scores.sinks,
        )  # fmt: skip
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class VarlenMask(SequenceMask):
    """Only the listed tokens take part: they are gathered, attended to, and put back among zeros."""

    tokens_q: Tokens | None  # None is all of them
    tokens_k: Tokens | None
    cu_seqlens_q: Tensor  # int32 (number of sequences + 1,)
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scores: Scores) -> Tensor:
        if bias is not None:
            return self._attend_as_tensor(q, k, v, bias, scores)
        out = attend_varlen(
            _taken(q, self.tokens_q), _taken(k, self.tokens_k), _taken(v, self.tokens_k), scores, self.causal,
            self.window, self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k,
        )  # fmt: skip
        shape = (*q.shape[:-1], v.shape[-1])
        if self.tokens_q is None:
            return out.view(shape)
        return out.new_zeros(shape).index_put(self.tokens_q, out)


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scores: Scores,
    causal: bool = False,
    window: Window = (-1, -1),
    **masked: PairMask,
) -> Tensor:
    """fast_attn_func, or its replacement, with a layer's scores. masked: block_mask, of fast_attn_func alone."""
    out: Tensor = scores.functions.dense(
        q, k, v, scores.dropout_p, scores.softmax_scale, causal, window, scores.softcap, attn_bias=bias,
        sinks=scores.sinks, **masked,
    )  # fmt: skip
    return out


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    causal: bool,
    window: Window,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Tensor:
    """fast_attn_varlen_func, or its replacement, with a layer's scores."""
    out: Tensor = scores.functions.varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scores.dropout_p, scores.softmax_scale,
        causal, window, scores.softcap, sinks=scores.sinks,
    )  # fmt: skip
    return out


def combine(mask: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One attn_bias, in `dtype` or float32, from a bias and a mask: bool (True is seen) or added to the scores."""
    if mask.dtype is torch.bool:
        seen = torch.zeros((), dtype=dtype, device=mask.device) if bias is None else bias
        return torch.where(mask, seen, -torch.inf)
    if not mask.dtype.is_floating_point:
        raise ArgumentError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}; with four dimensions it must be "
            "bool (True is seen) or floating point (added to the scores)"
        )
    mask = mask if mask.dtype in (dtype, torch.float32) else mask.float()
    return mask if bias is None else mask + bias


def _taken(tensor: Tensor, tokens: Tokens | None) -> Tensor:
    """The listed tokens, gathered: (total, nheads, headdim). One copy, for any strides."""
    return tensor.flatten(0, 1) if tokens is None else tensor[tokens]


def _moved(value: Any, device: torch.device | str | int) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
        return tuple(item.to(device) for item in value)
    return value
