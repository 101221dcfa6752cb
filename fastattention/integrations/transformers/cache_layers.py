"""The layers of a FastAttentionCache, with the interface that Transformers expects."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from fastattention.errors import UnsupportedError
from fastattention.integrations.transformers.stored import StoredTokens

_COMPILED = "torch.compile cannot trace a FastAttentionCache, which moves keys and values; call the model as it is"
_WHOLE = "a layer of a FastAttentionCache cannot be changed alone; call the method of the cache"


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_to_be_traced() -> None:
    """Raises. It is not traced itself, because torch.compile runs code that raises in a trace again without one."""
    raise UnsupportedError(_COMPILED)


class Owner(Protocol):
    """The cache."""

    @property
    def length(self) -> int:
        """Tokens of every sequence that all layers hold."""

    def append(self, index: int, k: Tensor, v: Tensor) -> StoredTokens | None:
        """As in `FastAttentionCache`."""


class StoredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer that keeps all tokens, in the store of the cache; `index` counts such layers."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: Owner, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache, self._index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the cache allocates memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Tensors for the first tokens of all, then StoredTokens."""
        if torch.compiler.is_compiling():
            _refuse_to_be_traced()
        stored = self._cache.append(self._index, key_states.transpose(1, 2), value_states.transpose(1, 2))
        return (key_states, value_states) if stored is None else (stored, stored)

    def get_seq_length(self) -> int:
        """Tokens of every sequence."""
        return self._cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys with the new ones, 0)."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1, because there is no fixed length."""
        return -1

    def offload(self) -> None:
        """Refused, like all changes of a single layer."""
        raise UnsupportedError(_WHOLE)

    prefetch = offload
    reset = offload

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Refused."""
        raise UnsupportedError(_WHOLE)


class IndexedLayer(StoredLayer):  # type: ignore[no-untyped-call]
    """A layer that also keeps the keys of its indexer, on the device of the model: 256 bytes a token."""

    def __init__(self, cache: Owner, index: int) -> None:
        super().__init__(cache, index)
        self._keys: Tensor | None = None  # (batch_size, capacity, headdim)
        self._length = 0  # tokens of every sequence that have keys

    def update_indexer(self, indexer_key_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Appends keys (batch_size, seqlen_new, headdim). Returns all, as a view."""
        held = min(self._length, self._cache.length)  # an earlier forward pass may have ended early
        batch_size, seqlen_new, headdim = indexer_key_states.shape
        end = held + seqlen_new
        if self._keys is None or end > self._keys.shape[1]:
            keys = indexer_key_states.new_empty(batch_size, end + max(end // 8, 64), headdim)
            if self._keys is not None:
                keys[:, :held] = self._keys[:, :held]
            self._keys = keys
        self._keys[:, held:end] = indexer_key_states
        self._length = end
        return self._keys[:, :end]

    def select_rows(self, rows: list[int]) -> None:
        """Sequence i goes on with the keys of sequence rows[i]."""
        if self._keys is not None:
            self._keys = self._keys[rows]

    def forget(self) -> None:
        """Forgets all keys."""
        self._keys, self._length = None, 0


class _Held(NamedTuple):
    """What a window layer held before its last update, which replaced these tensors."""

    keys: Tensor
    values: Tensor
    cumulative_length: int


class WindowLayer(DynamicSlidingWindowLayer):
    """A layer that keeps the tokens of its window. The next forward pass undoes an interrupted one."""

    def __init__(self, cache: Owner, sliding_window: int, **kwargs: Any) -> None:
        super().__init__(sliding_window, **kwargs)  # type: ignore[no-untyped-call]
        self._cache = cache
        self._held: _Held | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Appends, as Transformers' layer does, and remembers what it held before."""
        self.undo_interrupted()
        if self.keys is not None and self.values is not None:
            self._held = _Held(self.keys, self.values, self.cumulative_length)
        result: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return result

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(keys with the new ones, tokens that were forgotten)."""
        self.undo_interrupted()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length)
        return sizes

    def undo_interrupted(self) -> None:
        """Forgets tokens beyond those of the cache, which the last update added."""
        held = self._cache.length
        if self.cumulative_length <= held:
            return
        if self._held is None or held == 0:
            self.reset()
        else:
            self.keys, self.values, self.cumulative_length = self._held
        self._held = None
