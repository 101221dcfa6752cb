"""The configurations of the kernels of chunked linear attention, from which C++ reads its constants."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastattention.backends.cuda.common.arch import ARCH_FACTS, COMMON_FOLDERS, PLAIN_TILES
from fastattention.gpu_runtime.variant import Entry, Variant

FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)

HEADDIMS = (64, 128, 256)  # columns of a tile of queries or keys
_ELEMENT_BYTES = 2  # bytes of an element in shared memory, on Pascal too: floats would not fit


def padded_headdim(headdim: int) -> int:
    """Columns of tiles that hold a headdim."""
    return next(columns for columns in HEADDIMS if headdim <= columns)


def factors_of_chunk(chunk: int) -> int:
    """Floats that kernels/factors.cuh keeps of a chunk."""
    return 4 * chunk + 4


def _tile_bytes(rows: int, columns: int) -> int:
    """Bytes of a tile in shared memory, whose rows are padded by 16 bytes."""
    return rows * (columns * _ELEMENT_BYTES + 16)


@dataclass(frozen=True)
class _ChunkVariant(Variant):
    """Fields that all variants have."""

    include_folders: ClassVar = FOLDERS
    exports: ClassVar[tuple[str, ...]] = (
        "tile_m", "tile_n", "key_columns", "value_columns", "bfloat16", "bfloat16_operands", "num_warps",
        "shared_bytes", "gate_per_key", "delta_rule",
    )  # fmt: skip
    constants: ClassVar = PLAIN_TILES | {"element_bytes": _ELEMENT_BYTES, "num_stages": 1, "min_ctas": 1}

    arch: int  # code path: 60, 70, 75 or 80
    dtype: str  # "float16" or "bfloat16"
    headdim: int  # one of HEADDIMS: columns of keys, even where CTAs share them
    chunk: int  # tokens

    @property
    def tile_m(self) -> int:
        """Rows of tiles: the tokens of a chunk."""
        return self.chunk

    tile_n = tile_m

    @property
    def key_columns(self) -> int:
        """Columns of a tile of queries or keys."""
        return self.headdim

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values."""
        return self.headdim

    @property
    def bfloat16(self) -> bool:
        """Whether 16-bit tensors are bfloat16; otherwise they are float16."""
        return self.dtype == "bfloat16"

    bfloat16_operands = bfloat16

    @property
    def gate_per_key(self) -> bool:
        """Whether every key dimension has a gate."""
        return False


@dataclass(frozen=True)
class PrepareConfig(_ChunkVariant):
    """One variant of kernels/prepare.cuh."""

    delta_rule: bool

    source: ClassVar[str] = "prepare.cuh"
    # min_ctas is the number of CTAs that shared memory holds: without it the compiler takes 116 registers.
    constants: ClassVar = _ChunkVariant.constants | {"min_ctas": 4}

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_prepare", 32 * self.num_warps, self.shared_bytes),)

    @property
    def num_warps(self) -> int:
        """Warps of a CTA: each has one step of rows, of queries or of keys."""
        return self.chunk // ARCH_FACTS[self.arch].step_rows * (1 + self.delta_rule)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        products = self.chunk * (self.chunk + 8) * 4
        return 2 * _tile_bytes(self.chunk, self.headdim) + products + 4 * self.chunk * 4


@dataclass(frozen=True)
class PrepareKeysConfig(_ChunkVariant):
    """One variant of kernels/prepare_keys.cuh."""

    gate_format: int  # a value of GATE_FORMATS

    source: ClassVar[str] = "prepare_keys.cuh"
    exports: ClassVar = (*(name for name in _ChunkVariant.exports if name != "delta_rule"), "min_ctas")

    @property
    def min_ctas(self) -> int:
        """CTAs of a multiprocessor, with 128 registers a thread."""
        return 16 // self.num_warps

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_prepare_keys", 32 * self.num_warps, self.shared_bytes),)

    @property
    def num_warps(self) -> int:
        """Warps of a CTA: each has eight tokens."""
        return self.chunk // 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts: slices of 64 columns, and products of their gates."""
        sizes = 4 if self.chunk == 64 else 3  # one for each size of the parts that are joined
        return sizes * _tile_bytes(self.chunk, 64) + self.num_warps * 64 * 4


@dataclass(frozen=True)
class StatesConfig(_ChunkVariant):
    """One variant of kernels/states.cuh."""

    rule: str  # "delta"; or "head" or "key": gated linear attention with gates of heads or of key dimensions
    num_steps: int  # steps of columns of v that a CTA computes
    num_key_parts: int  # CTAs that share the key dimensions; 1 for the delta rule
    num_stages: int  # chunks in shared memory

    source: ClassVar[str] = "states.cuh"
    exports: ClassVar = (*_ChunkVariant.exports, "num_copy_warps")
    constants: ClassVar = {name: value for name, value in _ChunkVariant.constants.items() if name != "num_stages"}

    @property
    def key_columns(self) -> int:
        """Key dimensions of a CTA."""
        return self.headdim // self.num_key_parts

    @property
    def value_columns(self) -> int:
        """Columns of v of a CTA."""
        return self.columns

    @property
    def delta_rule(self) -> bool:
        """Whether the rule is the delta rule; otherwise it is gated linear attention."""
        return self.rule == "delta"

    @property
    def gate_per_key(self) -> bool:
        """Whether every key dimension has a gate."""
        return self.rule == "key"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function, which starts after the kernel before: early CTAs would crowd on few multiprocessors."""
        return (Entry("fastattention_linear_states", 32 * self.num_warps, self.shared_bytes),)

    @property
    def columns(self) -> int:
        """Columns of v that a CTA computes."""
        return self.num_steps * ARCH_FACTS[self.arch].step_rows

    @property
    def num_warps(self) -> int:
        """Warps that share the tokens of a chunk and the key dimensions of the state, and producer warps."""
        return 4 + self.num_copy_warps

    @property
    def num_copy_warps(self) -> int:
        """Producer warps: they issue the asynchronous copies for the consumer warps."""
        return 4 if self.num_stages > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        delta = self.rule == "delta"
        squares = delta * _tile_bytes(self.chunk, self.chunk)
        tokens = _tile_bytes(self.chunk, self.key_columns) + _tile_bytes(self.chunk, self.columns)
        factors = 4 * (self.key_columns if self.rule == "key" else factors_of_chunk(self.chunk))
        turns = 2 if self.num_stages > 1 and not delta else 1  # copies of the tiles that warps exchange
        exchange = turns * _tile_bytes(self.columns, self.key_columns) + (turns + 2 * delta) * _tile_bytes(
            self.columns, self.chunk
        )
        return self.num_stages * (squares + tokens + factors) + exchange


@dataclass(frozen=True)
class OutputsConfig(_ChunkVariant):
    """One variant of kernels/outputs.cuh."""

    rule: str  # as in StatesConfig
    columns: int  # columns of v of a CTA

    source: ClassVar[str] = "outputs.cuh"

    @property
    def value_columns(self) -> int:
        """Columns of v of a CTA."""
        return self.columns

    @property
    def delta_rule(self) -> bool:
        """Whether the rule is the delta rule; otherwise it is gated linear attention."""
        return self.rule == "delta"

    @property
    def gate_per_key(self) -> bool:
        """Whether every key dimension has a gate."""
        return self.rule == "key"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_outputs", 32 * self.num_warps, self.shared_bytes, overlaps=True),)

    @property
    def num_warps(self) -> int:
        """Warps that share the queries of a chunk, in steps, and the columns of v."""
        return 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        updates = (self.columns, self.chunk) if self.rule == "delta" else (self.chunk, self.columns)
        scores = _tile_bytes(self.chunk, self.chunk)
        return _tile_bytes(self.chunk + self.columns, self.headdim) + scores + _tile_bytes(*updates)
