"""DenseKVStore: plain tensors, for every device and backend."""

from __future__ import annotations

import torch
from torch import Tensor

from fastattention.kv_store.base import KVStore
from fastattention.kv_store.memory import allocate


class DenseKVStore(KVStore):
    """A store of two plain tensors, for every device and backend.

    They are kept heads first, (batch_size, nheads_k, capacity, headdim), so that each head is contiguous. The arguments
    are those of `KVStore`.
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
        self._k, self._v = (
            allocate((self.batch_size, self.nheads_k, self.capacity, columns), dtype, self.device).transpose(1, 2)
            for columns in (self.headdim, self.headdim_v)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
        return self._k.nbytes + self._v.nbytes

    def read(self) -> tuple[Tensor, Tensor]:
        """The tensors themselves."""
        return self._k, self._v
