"""The configurations of the kernels of chunked linear attention, and their macros."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fastattention.backends.cuda.common.arch import ARCH_FACTS, COMMON_FOLDERS
from fastattention.gpu_runtime.variant import Entry

FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)

HEADDIMS = (64, 128, 256)  # columns of a tile of queries or keys
_ELEMENT_BYTES = 2  # in shared memory, on Pascal too: floats would not fit


def padded_headdim(headdim: int) -> int:
    """Columns of tiles that hold a headdim."""
    return next(columns for columns in HEADDIMS if headdim <= columns)


def factors_of_chunk(chunk: int) -> int:
    """Floats that kernels/factors.cuh has of a chunk."""
    return 4 * chunk + 4


def _tile_bytes(rows: int, columns: int) -> int:
    """Of a tile in shared memory: rows are padded by 16 bytes."""
    return rows * (columns * _ELEMENT_BYTES + 16)


@dataclass(frozen=True)
class PrepareConfig:
    """One variant of kernels/prepare.cuh."""

    include_folders: ClassVar = FOLDERS
    arch: int  # code path: 60, 70, 75 or 80
    dtype: str  # "float16" or "bfloat16"
    headdim: int  # one of HEADDIMS
    chunk: int  # tokens
    delta_rule: bool

    source: ClassVar[str] = "prepare.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_prepare", 32 * self.num_warps, self.shared_bytes),)

    @property
    def num_warps(self) -> int:
        """A warp has a step of rows, of queries or of keys."""
        return self.chunk // ARCH_FACTS[self.arch].step_rows * (1 + self.delta_rule)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; the kernel asserts the same."""
        products = self.chunk * (self.chunk + 8) * 4
        return 2 * _tile_bytes(self.chunk, self.headdim) + products + 4 * self.chunk * 4

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        rule = "delta" if self.delta_rule else "head"
        return f"linear_prepare_{rule}_sm{self.arch}_{self.dtype}_d{self.headdim}c{self.chunk}"

    def macros(self) -> dict[str, str]:
        """What the kernel, and kernels/variant.cuh of attention, are compiled with."""
        return {
            **_macros(self.arch, self.dtype, self.headdim, self.chunk, self.delta_rule),
            "FA_HEADDIM_V": str(self.headdim),
            "FA_WARPS": str(self.num_warps),
            "FA_MIN_CTAS": "4",  # as many as shared memory holds: the compiler takes 116 registers otherwise
            "FA_STAGES": "1",
            "FA_SHARED_BYTES": str(self.shared_bytes),
        }


@dataclass(frozen=True)
class PrepareKeysConfig:
    """One variant of kernels/prepare_keys.cuh."""

    include_folders: ClassVar = FOLDERS
    arch: int  # code path: 60, 70, 75 or 80
    dtype: str  # "float16" or "bfloat16"
    headdim: int  # one of HEADDIMS
    chunk: int  # tokens: 32 or 64
    gate_format: int  # of GATE_FORMATS

    source: ClassVar[str] = "prepare_keys.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_prepare_keys", 32 * self.num_warps, self.shared_bytes),)

    @property
    def num_warps(self) -> int:
        """A warp has eight tokens."""
        return self.chunk // 8

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; the kernel asserts the same: slices of 64 columns, and products of their gates."""
        sizes = 4 if self.chunk == 64 else 3  # of parts that are joined
        return sizes * _tile_bytes(self.chunk, 64) + self.num_warps * 64 * 4

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        return f"linear_prepare_keys_sm{self.arch}_{self.dtype}_d{self.headdim}c{self.chunk}g{self.gate_format}"

    def macros(self) -> dict[str, str]:
        """What the kernel, and kernels/variant.cuh of attention, are compiled with."""
        return {
            **_macros(self.arch, self.dtype, self.headdim, self.chunk, False),
            "FA_GATE_FORMAT": str(self.gate_format),
            "FA_HEADDIM_V": str(self.headdim),
            "FA_WARPS": str(self.num_warps),
            "FA_MIN_CTAS": str(16 // self.num_warps),  # 128 registers a thread
            "FA_STAGES": "1",
            "FA_SHARED_BYTES": str(self.shared_bytes),
        }


@dataclass(frozen=True)
class StatesConfig:
    """One variant of kernels/states.cuh."""

    include_folders: ClassVar = FOLDERS
    arch: int
    dtype: str
    headdim: int  # one of HEADDIMS, of keys: all of them
    chunk: int  # tokens
    rule: str  # "delta", or of gated linear attention with a gate a "head" or a "key" dimension
    num_steps: int  # of columns of v, of a CTA
    num_key_parts: int  # CTAs that share the key dimensions; 1 for the delta rule
    num_stages: int  # chunks in shared memory

    source: ClassVar[str] = "states.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function. CTAs that began early would crowd on the first multiprocessors that are free."""
        return (Entry("fastattention_linear_states", 32 * self.num_warps, self.shared_bytes),)

    @property
    def columns(self) -> int:
        """Of v, of a CTA."""
        return self.num_steps * ARCH_FACTS[self.arch].step_rows

    @property
    def keys(self) -> int:
        """Key dimensions of a CTA."""
        return self.headdim // self.num_key_parts

    @property
    def num_warps(self) -> int:
        """That share out the tokens of a chunk and the key dimensions of the state, and those that copy."""
        return 4 + self.num_copy_warps

    @property
    def num_copy_warps(self) -> int:
        """That copy for the others, where copies are asynchronous."""
        return 4 if self.num_stages > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; the kernel asserts the same."""
        delta = self.rule == "delta"
        squares = delta * _tile_bytes(self.chunk, self.chunk)
        tokens = _tile_bytes(self.chunk, self.keys) + _tile_bytes(self.chunk, self.columns)
        factors = 4 * (self.keys if self.rule == "key" else factors_of_chunk(self.chunk))
        turns = 2 if self.num_stages > 1 and not delta else 1  # of what warps exchange
        exchange = turns * _tile_bytes(self.columns, self.keys) + (turns + 2 * delta) * _tile_bytes(
            self.columns, self.chunk
        )
        return self.num_stages * (squares + tokens + factors) + exchange

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        tiles = f"d{self.headdim}p{self.num_key_parts}c{self.chunk}v{self.columns}s{self.num_stages}"
        return f"linear_states_{self.rule}_sm{self.arch}_{self.dtype}_{tiles}"

    def macros(self) -> dict[str, str]:
        """What the kernel, and kernels/variant.cuh of attention, are compiled with."""
        return {
            **_macros(self.arch, self.dtype, self.keys, self.chunk, self.rule == "delta"),
            "FA_GATE_PER_KEY": str(int(self.rule == "key")),
            "FA_KEY_PARTS": str(self.num_key_parts),
            "FA_HEADDIM_V": str(self.columns),
            "FA_WARPS": str(self.num_warps),
            "FA_COPY_WARPS": str(self.num_copy_warps),
            "FA_MIN_CTAS": "1",
            "FA_STAGES": str(self.num_stages),
            "FA_SHARED_BYTES": str(self.shared_bytes),
        }


@dataclass(frozen=True)
class OutputsConfig:
    """One variant of kernels/outputs.cuh."""

    include_folders: ClassVar = FOLDERS
    arch: int
    dtype: str
    headdim: int  # one of HEADDIMS, of keys
    chunk: int  # tokens
    rule: str  # as of StatesConfig
    columns: int  # of v, of a CTA

    source: ClassVar[str] = "outputs.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_linear_outputs", 32 * self.num_warps, self.shared_bytes, overlaps=True),)

    @property
    def num_warps(self) -> int:
        """That share out the queries of a chunk in steps, and columns of v."""
        return 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; the kernel asserts the same."""
        updates = (self.columns, self.chunk) if self.rule == "delta" else (self.chunk, self.columns)
        scores = _tile_bytes(self.chunk, self.chunk)
        return _tile_bytes(self.chunk + self.columns, self.headdim) + scores + _tile_bytes(*updates)

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        return f"linear_outputs_{self.rule}_sm{self.arch}_{self.dtype}_d{self.headdim}c{self.chunk}v{self.columns}"

    def macros(self) -> dict[str, str]:
        """What the kernel, and kernels/variant.cuh of attention, are compiled with."""
        return {
            **_macros(self.arch, self.dtype, self.headdim, self.chunk, self.rule == "delta"),
            "FA_GATE_PER_KEY": str(int(self.rule == "key")),
            "FA_HEADDIM_V": str(self.columns),
            "FA_WARPS": str(self.num_warps),
            "FA_MIN_CTAS": "1",
            "FA_STAGES": "1",
            "FA_SHARED_BYTES": str(self.shared_bytes),
        }


def _macros(arch: int, dtype: str, headdim: int, chunk: int, delta_rule: bool) -> dict[str, str]:
    """Those that the kernels have in common. What attention has besides is off."""
    off = (
        "FA_CACHE_FORMAT", "FA_MODIFIES", "FA_DROPS", "FA_PAGED", "FA_INT8_PRODUCTS", "FA_BLOCK_SPARSE",
        "FA_MIXES_BLOCKS", "FA_GROUPED_ROWS", "FA_SPLIT_KEYS_ACROSS_WARPS", "FA_VALUES_IN_KEYS",
        "FA_QUERIES_IN_REGISTERS", "FA_SWIZZLED",
    )  # fmt: skip
    return {
        **dict.fromkeys(off, "0"),
        "FA_ARCH_HEADER": f'"arch/sm{arch}.cuh"',
        "FA_BFLOAT16": str(int(dtype == "bfloat16")),
        "FA_BFLOAT16_OPERANDS": str(int(dtype == "bfloat16")),
        "FA_ELEMENT_BYTES": str(_ELEMENT_BYTES),
        "FA_CHUNK": str(chunk),
        "FA_DELTA_RULE": str(int(delta_rule)),
        "FA_HEADDIM": str(headdim),
        "FA_TILE_M": str(chunk),
        "FA_TILE_N": str(chunk),
        "FA_VALUE_PARTS": "1",
        "FA_COLUMN_WARPS": "1",
    }
