"""StoredTokens, which a FastAttentionCache gives a layer instead of tensors, and attention to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastattention.errors import ArgumentError, UnsupportedError
from fastattention.integrations.transformers.masks import CachedMask, DenseMask, Scores, SequenceMask
from fastattention.offload.kv_store import CooperativeKVStore
from fastattention.offload.layer import AttendOptions, Padding

_NEEDED = (
    "a FastAttentionCache is read by fast_attention alone; load the model with attn_implementation='fast_attention'"
)


class PaddingOf:
    """The padding of a mask, read from the device once a forward pass: every layer gets the same mask."""

    def __init__(self) -> None:
        self._lengths: Tensor | None = None
        self._padding: Padding | None = None

    def __call__(self, lengths: Tensor) -> Padding:
        """The Padding. lengths: int32 (batch_size,), padding tokens at the start of each sequence."""
        if self._lengths is not lengths:
            counts: list[int] = lengths.tolist()
            self._lengths = lengths
            # Padding equal to that of the previous pass is reused, with the tensors that the store has made of it.
            if self._padding is None or self._padding.counts != counts:
                self._padding = Padding(counts)
        assert self._padding is not None
        return self._padding


class NewTokens(NamedTuple):
    """Keys and values that a layer is about to add: (batch_size, seqlen_new, nheads_k, headdim or headdim_v)."""

    k: Tensor
    v: Tensor


class StoredTokens:
    """All keys, or all values, of a layer: stored ones and new ones, which `attend` appends."""

    def __init__(self, store: CooperativeKVStore, index: int, new: NewTokens, padding_of: PaddingOf) -> None:
        self._store, self._index, self._new, self._padding_of = store, index, new, padding_of

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of keys with the new ones: (batch_size, nheads_k, seqlen_k, headdim)."""
        batch_size, seqlen_new, nheads_k, headdim = self._new.k.shape
        return batch_size, nheads_k, self._store.length_of(self._index) + seqlen_new, headdim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self._new.k.dtype

    @property
    def device(self) -> torch.device:
        """The device of new keys and values."""
        return self._new.k.device

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"keys and values in a FastAttentionCache have no {name!r}: {_NEEDED}")

    def __getitem__(self, index: object) -> Tensor:
        raise UnsupportedError(f"keys and values in a FastAttentionCache cannot be indexed: {_NEEDED}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any, **__: Any) -> Tensor:
        name = getattr(function, "__name__", function)
        raise UnsupportedError(f"keys and values in a FastAttentionCache are no argument of torch's {name}: {_NEEDED}")

    def attend(
        self,
        q: Tensor,
        mask: SequenceMask | Tensor | None,
        bias: Tensor | None,
        scores: Scores,
        indices: Tensor | None = None,
    ) -> Tensor:
        """Appends the new tokens and attends with their queries q, (batch_size, seqlen_q, nheads, headdim).

        indices: int32 (batch_size, seqlen_q, topk), the keys that an indexer has selected under the mask, then -1
        """
        options = self._options(q, mask, bias, scores)._replace(indices=indices)
        return self._store.attend(self._index, q, *self._new, options)

    def _options(
        self, q: Tensor, mask: SequenceMask | Tensor | None, bias: Tensor | None, scores: Scores
    ) -> AttendOptions:
        if bias is not None or scores.dropout_p:
            what = "a position_bias" if bias is not None else f"dropout of {scores.dropout_p}"
            raise UnsupportedError(f"{what} cannot be combined with a FastAttentionCache; use a DynamicCache")
        return AttendOptions(scores.softmax_scale, scores.softcap, scores.sinks, self._padding(q, mask))

    def _padding(self, q: Tensor, mask: SequenceMask | Tensor | None) -> Padding | None:
        """The padding before every sequence, when the mask hides only that and is causal; else None."""
        if mask is None:
            return None
        tokens = self._store.length + q.shape[1] if self._index == 0 else None
        if isinstance(mask, DenseMask | CachedMask):
            num_keys = mask.shape[3]
            if tokens is not None and num_keys != tokens:
                raise ArgumentError(
                    f"the mask is for {num_keys} keys and the cache holds {tokens} with the new ones; an earlier "
                    "forward pass may have ended early: call the model again"
                )
            leftpad = mask.cache_leftpad if isinstance(mask, CachedMask) else None
            to_the_end = not isinstance(mask, CachedMask) or mask.reaches_end
            causal = mask.causal or (q.shape[1] == 1 and mask.window == (-1, -1))
            if causal and to_the_end and (mask.window[0] < 0 or mask.window[0] >= num_keys - 1):
                return None if leftpad is None else self._padding_of(leftpad)
        raise UnsupportedError(
            f"a FastAttentionCache serves causal attention to all tokens before, with padding on the left; this mask "
            f"is {_described(mask)}; pad on the left and give an attention_mask that has the new tokens, or use a "
            "DynamicCache"
        )


def _described(mask: SequenceMask | Tensor) -> str:
    if isinstance(mask, torch.Tensor):
        return f"a tensor of shape {tuple(mask.shape)}"
    if isinstance(mask, CachedMask) and not mask.reaches_end:
        return "one that leaves out the last tokens"
    return f"{type(mask).__name__} with causal={mask.causal} and window={mask.window}"
