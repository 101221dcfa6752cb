"""KeyScoresConfig and TopKeysConfig: the variants of the kernels. C++ reads its constants from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.backends.cuda.common.tiles import PlainTiles, TileVariant
from fastattention.gpu_runtime.variant import Entry, Variant

FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)
HEADDIMS = (64, 128)  # columns of a tile of queries or keys
MOST_HEADS = 64  # heads of a query that fit the registers of a warp


@dataclass(frozen=True)
class KeyScoresConfig(PlainTiles, TileVariant):
    """One variant of kernels/key_scores.cuh."""

    source: ClassVar[str] = "key_scores.cuh"
    include_folders: ClassVar = FOLDERS
    element_bytes: ClassVar = 2  # in shared memory, on Pascal too: floats would not fit
    column_warps: ClassVar = 1
    num_warps: ClassVar = 8

    head_rows: int  # heads of a query, padded to 16, 32 or 64
    pads_heads: bool  # whether some of them do not exist
    queries: int  # of a CTA: each has num_warps / queries warps, which share the keys of a tile
    tile_n: int
    num_stages: int
    paged: bool

    @property
    def queries_in_registers(self) -> bool:  # type: ignore[override]
        """Otherwise they stay in shared memory: products of Pascal read it anyway."""
        return self.arch >= 70

    @property
    def swizzled(self) -> bool:
        """Rows without padding, for asynchronous copies."""
        return self.arch >= 80

    @property
    def tile_m(self) -> int:
        """Rows of queries of a CTA."""
        return self.queries * self.head_rows

    @property
    def value_columns(self) -> int:
        """There are no values; headers of products want a width."""
        return self.headdim

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        queries = 0 if self.queries_in_registers else self.tile_bytes(self.tile_m, self.headdim)
        return self.num_stages * self.tile_bytes(self.tile_n, self.headdim) + queries

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_key_scores", self.num_warps, self.shared_bytes),)


@dataclass(frozen=True)
class TopKeysConfig(Variant):
    """One variant of kernels/top_keys.cuh."""

    source: ClassVar[str] = "top_keys.cuh"
    include_folders: ClassVar = FOLDERS
    bin_copies: ClassVar = 4  # lanes with neighbouring scores add to different copies of a bin

    num_warps: int  # a power of two, at most 32

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        return self.bin_copies * 2048 * 4 + self.num_warps * 4 + 8

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_top_keys", self.num_warps, self.shared_bytes),)
