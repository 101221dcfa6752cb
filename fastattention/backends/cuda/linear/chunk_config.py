"""The configurations of the kernels of chunked linear attention, from which C++ reads its constants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastattention.backends.cuda.common.arch import COMMON_FOLDERS
from fastattention.backends.cuda.common.tiles import PlainTiles, TileVariant
from fastattention.gpu_runtime.variant import Entry

FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)

HEADDIMS = (64, 128, 256)  # columns of a tile of queries or keys


def padded_headdim(headdim: int) -> int:
    """Columns of tiles that hold a headdim."""
    return next(columns for columns in HEADDIMS if headdim <= columns)


@dataclass(frozen=True)
class ChunkVariant(PlainTiles, TileVariant):
    """What the kernels have in common. headdim: one of HEADDIMS, of keys: all of them."""

    include_folders: ClassVar = FOLDERS
    element_bytes: ClassVar = 2  # in shared memory, on Pascal too: floats would not fit
    column_warps: ClassVar = 1

    chunk: int  # tokens
    rule: str  # delta rules: "delta", or "kda" with gates per key; otherwise with a gate a "head" or a "key" dimension

    @property
    def tile_m(self) -> int:
        """Rows of tiles: the tokens of a chunk."""
        return self.chunk

    tile_n = tile_m

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values."""
        return self.headdim

    @property
    def num_factors(self) -> int:
        """Floats of a chunk in scratch (kernels/factors.cuh)."""
        return self.key_columns + self.delta_rule * self.chunk if self.gate_per_key else 4 * self.chunk + 4

    @property
    def delta_rule(self) -> bool:
        """Otherwise gated linear attention."""
        return self.rule in ("delta", "kda")

    @property
    def gate_per_key(self) -> bool:
        """Whether every key dimension has a gate."""
        return self.rule in ("key", "kda")

    @property
    def num_warps(self) -> int:
        """Warps of a CTA."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        raise NotImplementedError

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry(f"fastattention_linear_{self.source.removesuffix('.cuh')}", self.num_warps, self.shared_bytes),)


@dataclass(frozen=True)
class PrepareConfig(ChunkVariant):
    """One variant of kernels/prepare.cuh, for a gate a head."""

    source: ClassVar[str] = "prepare.cuh"
    num_stages: ClassVar = 1
    min_ctas: ClassVar = 4  # as many as shared memory holds: the compiler takes 116 registers otherwise

    @property
    def num_warps(self) -> int:
        """A warp has a step of rows, of queries or of keys."""
        return self.chunk // self.step_rows * (1 + self.delta_rule)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        products = self.chunk * (self.chunk + 8) * 4
        return 2 * self.tile_bytes(self.chunk, self.headdim) + products + 4 * self.chunk * 4


@dataclass(frozen=True)
class PrepareKeysConfig(ChunkVariant):
    """One variant of kernels/prepare_keys.cuh, for a gate a key dimension."""

    source: ClassVar[str] = "prepare_keys.cuh"
    num_stages: ClassVar = 1
    slice_columns: ClassVar = 64  # of queries and keys at a time

    gate_format: int  # of DTYPE_CODES

    @property
    def min_ctas(self) -> int:
        """CTAs of a multiprocessor, with 128 registers a thread."""
        return 16 // self.num_warps

    @property
    def num_warps(self) -> int:
        """Warps of a CTA: each has eight tokens."""
        return self.chunk // 8

    @property
    def num_sizes(self) -> int:
        """Sizes of parts of tokens: of 4, 8 and so on, up to half a chunk."""
        return (self.chunk // 4).bit_length() - 1

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts (kernels/prepare_keys.cuh)."""
        columns, delta = self.slice_columns, self.delta_rule
        tiles = self.num_sizes * self.tile_bytes(self.chunk // 2 * (2 + delta), columns)
        return tiles + self.num_warps * columns * 4 + 3 * delta * self.chunk * 4


@dataclass(frozen=True)
class ChainConfig(ChunkVariant):
    """What kernels have in common that go from chunk to chunk (kernels/chain.cuh)."""

    min_ctas: ClassVar = 1

    num_steps: int  # of columns of v, of a CTA
    num_key_parts: int  # CTAs that share the key dimensions; 1 for delta rules
    num_stages: int  # chunks in shared memory

    @property
    def key_columns(self) -> int:
        """Key dimensions of a CTA."""
        return self.headdim // self.num_key_parts

    @property
    def value_columns(self) -> int:
        """Columns of v that a CTA computes."""
        return self.num_steps * self.step_rows

    @property
    def num_warps(self) -> int:
        """Warps that share the tokens of a chunk and the key dimensions of the state, and producer warps."""
        return 4 + self.num_copy_warps

    @property
    def num_copy_warps(self) -> int:
        """Producer warps: they issue the asynchronous copies for the consumer warps."""
        return 4 if self.num_stages > 1 else 0


@dataclass(frozen=True)
class StatesConfig(ChainConfig):
    """One variant of kernels/states.cuh."""

    source: ClassVar[str] = "states.cuh"

    reversed: bool = False  # for gradients, without the delta rule

    @property
    def values_ahead(self) -> bool:
        """Values of the next chunk become operands while this one's are multiplied: a chunk has one barrier."""
        return self.num_stages > 1 and not self.delta_rule

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        columns, delta = self.value_columns, self.delta_rule
        squares = delta * self.tile_bytes(self.chunk, self.chunk)
        keys, values = self.tile_bytes(self.chunk, self.key_columns), self.tile_bytes(self.chunk, columns)
        turns = 1 + self.values_ahead  # of what warps exchange
        states, updates = self.tile_bytes(columns, self.key_columns), self.tile_bytes(columns, self.chunk)
        if delta and self.gate_per_key:  # a second tile of keys, whose place updates take
            keys, exchanged = keys + max(keys, updates), updates
        else:
            exchanged = (turns + 2 * delta) * updates
        return self.num_stages * (squares + keys + values + 4 * self.num_factors) + turns * states + exchanged


@dataclass(frozen=True)
class StateGradientsConfig(ChainConfig):
    """One variant of kernels/state_gradients.cuh, for delta rules."""

    source: ClassVar[str] = "state_gradients.cuh"
    reversed: ClassVar = True

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        columns = self.value_columns
        keys = (2 + self.gate_per_key) * self.tile_bytes(self.chunk, self.headdim)  # and queries
        values = 2 * self.tile_bytes(self.chunk, columns)
        tiles = keys + self.tile_bytes(self.chunk, self.chunk) + values + 4 * self.num_factors
        return (
            self.num_stages * tiles + self.tile_bytes(columns, self.headdim) + 4 * self.tile_bytes(columns, self.chunk)
        )


@dataclass(frozen=True)
class TokenProductsConfig(ChunkVariant):
    """What kernels of gradients of tokens have in common (kernels/token_products.cuh)."""

    reversed: ClassVar = True
    min_ctas: ClassVar = 1
    part: ClassVar = 16  # tokens

    columns: int  # of v at a time
    num_stages: int  # slices of so many columns in shared memory

    @property
    def value_columns(self) -> int:
        """Columns of v at a time."""
        return self.columns

    @property
    def num_warps(self) -> int:
        """Each has a step of tokens, and some key dimensions."""
        return self.chunk // self.step_rows * self._column_parts

    @property
    def warp_columns(self) -> int:
        """Key dimensions of a warp. A lane of key_gradients.cuh has one of them, and a part of the warp's step."""
        return 32 * self.part // self.step_rows

    @property
    def _column_parts(self) -> int:
        return self.headdim // self.warp_columns

    @property
    def _slice_bytes(self) -> int:
        tokens = (2 + self.delta_rule) * self.tile_bytes(self.chunk, self.columns)
        return self.num_stages * (tokens + 2 * self.tile_bytes(self.columns, self.headdim))

    @property
    def _square_bytes(self) -> int:
        return 2 * (1 + self.delta_rule) * self.tile_bytes(self.chunk, self.chunk)


@dataclass(frozen=True)
class TokenGradientsConfig(TokenProductsConfig):
    """One variant of kernels/token_gradients.cuh, for a gate a head."""

    source: ClassVar[str] = "token_gradients.cuh"

    rows_early: bool  # queries and keys have memory of their own, so they are copied while slices are

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        chunk, delta, parts = self.chunk, self.delta_rule, self._column_parts
        rows = 2 * self.tile_bytes(chunk, self.headdim)
        later = self._square_bytes + (not self.rows_early) * rows
        products = chunk * (chunk + 8) * 4 + chunk * 4
        planes = 6 + chunk // self.step_rows + (1 + delta) * (min(parts, chunk // 8) + parts) + 3 * parts
        paths = -(-self.num_warps // 4) * 16
        return max(self._slice_bytes, later) + products + planes * chunk * 4 + paths + self.rows_early * rows


@dataclass(frozen=True)
class KeyGradientsConfig(TokenProductsConfig):
    """One variant of kernels/key_gradients.cuh, for a gate a key dimension."""

    source: ClassVar[str] = "key_gradients.cuh"

    gate_format: int  # of DTYPE_CODES

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        chunk, delta, headdim = self.chunk, self.delta_rule, self.headdim
        tiles = max(self._slice_bytes, self._square_bytes + self.num_warps * headdim * 4)
        tiles += (2 + delta) * self.tile_bytes(chunk, headdim)
        buffers = (2 + delta) * self.num_warps * self.step_rows * (self.warp_columns + 2) * 4
        own, planes = 2 * (1 + delta) * chunk * self.part * 4, 4 + (2 + delta) * self._column_parts
        return max(tiles, buffers) + own + 3 * chunk // self.part * headdim * 4 + planes * chunk * 4


@dataclass(frozen=True)
class OutputsConfig(ChunkVariant):
    """One variant of kernels/outputs.cuh."""

    source: ClassVar[str] = "outputs.cuh"
    num_stages: ClassVar = 1
    min_ctas: ClassVar = 4  # as many as shared memory holds: the compiler takes 200 registers otherwise
    num_warps: ClassVar = 4

    columns: int  # of v, of a CTA
    reversed: bool = False  # for gradients

    @property
    def value_columns(self) -> int:
        """Columns of v that a CTA computes."""
        return self.columns

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function, which may start early."""
        return (super().entries[0]._replace(overlaps=True),)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        asks_state = not (self.reversed and self.delta_rule)
        state = asks_state * self.tile_bytes(self.chunk + self.columns, self.headdim)
        return state + self.tile_bytes(self.chunk, self.chunk) + self.tile_bytes(self.chunk, self.columns)
