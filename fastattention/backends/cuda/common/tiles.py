"""What C++ reads of kernels of all families: of elements, and of tiles that matrix products take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fastattention.backends.cuda.common.arch import ARCH_FACTS
from fastattention.gpu_runtime.variant import Variant


class Elements:
    """Fields of a kernel that reads elements of a dtype (kernels/element.cuh)."""

    dtype: torch.dtype

    @property
    def bfloat16(self) -> bool:
        """Whether 16-bit elements are; otherwise they are float16."""
        return self.dtype is torch.bfloat16

    @property
    def float32(self) -> bool:
        """Whether elements are."""
        return self.dtype is torch.float32


@dataclass(frozen=True)
class TileVariant(Elements, Variant):
    """A kernel that multiplies tiles (kernels/variant.cuh)."""

    arch: int  # code path: 60, 70, 75 or 80
    dtype: torch.dtype  # float16 or bfloat16
    headdim: int  # columns of a tile of queries and keys; the call's headdim may be less

    @property
    def bfloat16_operands(self) -> bool:
        """Whether matrix products take bfloat16 as it is."""
        return self.bfloat16 and self.arch >= 80

    @property
    def key_columns(self) -> int:
        """Columns of a tile of queries or keys of a CTA, in 16-bit elements."""
        return self.headdim

    @property
    def swizzled(self) -> bool:
        """How rows lie in shared memory (kernels/shared_tile.cuh)."""
        return False

    @property
    def row_padding(self) -> int:
        """Bytes between two rows in shared memory."""
        return 0 if self.swizzled else 16

    @property
    def step_rows(self) -> int:
        """Query rows that a warp's matrix instruction takes."""
        return ARCH_FACTS[self.arch].step_rows

    def tile_bytes(self, rows: int, columns: int, element_bytes: int = 2) -> int:
        """Bytes of a tile in shared memory."""
        return rows * (columns * element_bytes + self.row_padding)


class PlainTiles:
    """Tiles of 16-bit elements, without a cache: what kernels/variant.cuh reads that only attention varies."""

    quantized: ClassVar = False
    cache_is_int8: ClassVar = False
    int8_products: ClassVar = False
    queries_in_registers: ClassVar = False
    values_in_keys: ClassVar = False
