"""PackedKVStore: keys and values in interleaved panels, which the cpu backend decodes from fastest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fastattention.attention.validation import PanelCache
from fastattention.backends.common import panel_cache
from fastattention.engine.checks import TensorSpec
from fastattention.engine.operator import Request
from fastattention.errors import ArgumentError
from fastattention.kv_store.base import KVStore
from fastattention.kv_store.memory import allocate


class PackedKVStore(KVStore):
    """A store for the cpu backend, whose tokens are stored in interleaved panels, as its kernels read them.

    Decoding reads it faster than plain tensors. Writing a prompt takes a few times as long, which is little compared
    with attending to it. The arguments are those of `KVStore`. Calls cannot be traced by torch.compile, and take plain
    tensors only; a DenseKVStore has neither limit.
    """

    def __init__(
        self,
        batch_size: int,
        capacity: int,
        nheads_k: int,
        headdim: int,
        headdim_v: int | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(batch_size, capacity, nheads_k, headdim, headdim_v, dtype=dtype, device=device)
        if self.device.type != "cpu":
            raise ArgumentError(f"device={self.device}: a packed store is for the cpu; use a DenseKVStore")
        sizes = (self.batch_size, self.capacity, self.nheads_k)
        self._cache = PanelCache(
            TensorSpec(torch.Size((*sizes, self.headdim)), dtype, self.device),
            TensorSpec(torch.Size((*sizes, self.headdim_v)), dtype, self.device),
            panel_cache.PANEL_SIZE,
        )
        self._k = allocate(panel_cache.key_shape(*sizes, self.headdim, dtype), dtype, self.device)
        shape = panel_cache.value_shape(*sizes, self.headdim_v, dtype)
        count, slack = math.prod(shape), panel_cache.SLACK_BYTES // dtype.itemsize
        self._v = allocate((count + slack,), dtype, self.device)[:count].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors, whole panels."""
        return self._k.nbytes + self._v.nbytes

    def read(self) -> tuple[Tensor, Tensor]:
        """Copies of the tokens, in the dense layout."""
        keys = panel_cache.keys_from_panels(self._k, self.capacity, self.headdim)
        return keys, panel_cache.values_from_panels(self._v, self.capacity)

    def _request(self, q: Tensor, k: Tensor | None, v: Tensor | None, **options: Any) -> Request:
        operator, given, scalars, backend, returned = super()._request(q, k, v, **options)
        return operator, given, scalars._replace(panels=self._cache), backend, returned
