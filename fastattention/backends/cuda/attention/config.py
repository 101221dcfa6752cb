"""The configurations of kernels (attention, its backward, append, merge) and their macros."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.attention.problem import MAX_HEADDIM
from fastattention.backends.cuda.common.arch import ARCH_FACTS, COMMON_FOLDERS, MAX_REGISTERS
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.variant import Entry

KERNEL_FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)

CACHE_FORMATS: dict[torch.dtype | None, str] = {None: "", torch.int8: "int8", torch.float8_e4m3fn: "float8"}
_CACHE_FORMAT_NUMBERS = {"": "0", "int8": "1", "float8": "2"}  # in kernels/element.cuh

# Head dimension beyond which warps or CTAs share out the columns of v.
WIDEST_OF_A_WARP = 256
# Beyond which Pascal's tiles are no floats, but of 16 bits: more would not fit the 48 KB that a CTA may have there.
_WIDEST_AS_FLOATS, _WIDEST_AS_FLOATS_IN_BACKWARDS = 256, 128
COMBINE_WARPS = 8  # of a CTA that merges the partial results of rows; kernels/combine.cuh says the same
COMBINE_TEAMS = 2 * COMBINE_WARPS  # half warps
APPEND_WARPS = 4  # likewise kernels/append.cuh
MERGE_WARPS = 4  # likewise kernels/merge.cuh
MERGE_COLUMNS = 128  # that each of them takes
DELTA_WARPS = 4  # likewise kernels/delta.cuh
QUANTIZE_THREADS = 128  # likewise kernels/quantize_rows.cuh


@dataclass(frozen=True)
class KernelConfig:
    """One variant of kernels/forward.cuh or kernels/decode.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    arch: int  # code path: 60, 70, 75 or 80
    dtype: str  # "float16" or "bfloat16"
    headdim: int  # columns of a tile of queries and keys; the call's headdim may be less
    headdim_v: int  # likewise, of a CTA
    tile_m: int  # query rows of a CTA
    tile_n: int  # keys of a tile
    num_warps: int
    num_stages: int  # tiles of keys, and of values, in shared memory
    min_ctas: int  # CTAs of a multiprocessor for which the compiler leaves registers
    queries_in_registers: bool  # otherwise they are read from shared memory for every tile of keys
    num_value_parts: int  # CTAs that share the columns of v, where one has too few registers for all
    modifies_scores: bool  # softcap, ALiBi or bias, or a softmax_scale that is not positive
    paged: bool
    drops: bool = False  # dropout may be on
    decodes: bool = False  # rows are those of all heads that share a key head, rather than the tokens of one
    cache_format: str = ""  # of a quantized cache: "int8" or "float8"
    split_keys_across_warps: bool = False  # every warp has all rows and keys of its own, in a decode of few rows
    column_warps: int = 1  # warps with the same rows, which share out the columns of v
    values_in_keys: bool = False  # v is the first columns of k, in the same memory
    block_sparse: bool = False  # there is a block mask
    mixes_blocks: bool = False  # rows of a CTA lie in several of its rows
    int8_products: bool = False  # queries and keys are bytes (kernels/quantize_rows.cuh)

    @property
    def source(self) -> str:
        """The header in kernels/ that is compiled."""
        return "decode.cuh" if self.decodes else "forward.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its functions: a decode and the merge of its partial results, or a forward."""
        if not self.decodes:
            return (Entry("fastattention_forward", self.num_threads, self.shared_bytes),)
        return (
            Entry("fastattention_decode", self.num_threads, self.shared_bytes, overlaps=True),
            Entry("fastattention_combine", 32 * COMBINE_WARPS, self.combine_bytes, overlaps=True),
        )

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def key_warps(self) -> int:
        """Warps that share out the keys of a tile of decode.cuh among themselves."""
        return self.num_warps if self.split_keys_across_warps else 1

    @property
    def row_warps(self) -> int:
        """Warps that share out the rows."""
        return self.num_warps // (self.key_warps * self.column_warps)

    @property
    def stream_tile(self) -> int:
        """Keys that a CTA takes at a time."""
        return self.tile_n * self.key_warps

    @property
    def element_bytes(self) -> int:
        """Of an element in shared memory: Pascal's floats, unless they are too many."""
        return 2 if self.headdim > _WIDEST_AS_FLOATS else ARCH_FACTS[self.arch].shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; the kernels assert the same."""
        size = self.element_bytes
        query_pitch = self._pitch(self._key_columns, size)
        # Asynchronous copies leave a quantized cache as it is.
        cache_size = 1 if self.cache_format and self.arch >= 80 else size
        key_bytes = self._pitch(self._key_columns, cache_size)
        if not self.values_in_keys:
            key_bytes += self._pitch(self.headdim_v, cache_size)
        stages = self.key_warps * self.num_stages * self.tile_n * (key_bytes + 8 * bool(self.cache_format))
        exchange = self._pitch(self.tile_n, 2) + 4 * self.column_warps if self.column_warps > 1 else 0
        if self.decodes:
            return self.tile_m * (query_pitch + exchange + 8 * self.key_warps) + stages
        rows = self.tile_m * (max(query_pitch, self._pitch(self.headdim_v, 2)) + exchange)
        return rows + stages + _block_list_bytes(self)

    @property
    def _key_columns(self) -> int:
        """Of tiles of queries and keys, 16 bits each: two bytes where these are multiplied."""
        return self.headdim // 2 if self.int8_products else self.headdim

    @property
    def combine_bytes(self) -> int:
        """Shared memory of a CTA that merges, which asserts the same: of each half warp a row, its maximum and sum."""
        return COMBINE_TEAMS * (self.headdim_v * self.num_value_parts + 4) * 4

    @property
    def swizzled(self) -> bool:
        """How rows lie in shared memory (kernels/shared_tile.cuh)."""
        return self.decodes and self.arch >= 80

    def _pitch(self, columns: int, element_bytes: int) -> int:
        """Bytes of a row in shared memory."""
        return columns * element_bytes + (0 if self.swizzled else 16)

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold scores, results and queries; the rest of a kernel takes about 40 more."""
        facts = ARCH_FACTS[self.arch]
        steps = self.tile_m // (self.row_warps * facts.step_rows)
        queries = self.headdim * facts.step_rows // 64 if self.queries_in_registers else 0
        columns = (self.tile_n + self.headdim_v) // self.column_warps
        return steps * (columns // 8 * facts.elements + queries)

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        parts = f"p{self.num_value_parts}" * (self.num_value_parts > 1)
        columns = f"c{self.column_warps}" * (self.column_warps > 1) + "l" * self.values_in_keys
        layout = "r" * self.split_keys_across_warps + "q" * self.queries_in_registers + parts + columns
        cache = f"_{self.cache_format}" if self.cache_format else ""
        features = cache + "_scores" * self.modifies_scores + "_paged" * self.paged + "_drops" * self.drops
        features += "_blocks" * self.block_sparse + "_mixed" * self.mixes_blocks + "_int8products" * self.int8_products
        return (
            f"{'decode' if self.decodes else 'forward'}_sm{self.arch}_{self.dtype}_d{self.headdim}x{self.headdim_v}"
            f"_m{self.tile_m}n{self.tile_n}w{self.num_warps}s{self.num_stages}b{self.min_ctas}{layout}{features}"
        )

    def macros(self) -> dict[str, str]:
        """What kernels/variant.cuh is compiled with."""
        return {
            **_tile_macros(self),
            "FA_HEADDIM": str(self._key_columns),
            "FA_INT8_PRODUCTS": str(int(self.int8_products)),
            "FA_CACHE_FORMAT": _CACHE_FORMAT_NUMBERS[self.cache_format],
            "FA_QUERIES_IN_REGISTERS": str(int(self.queries_in_registers)),
            "FA_PAGED": str(int(self.paged)),
            "FA_GROUPED_ROWS": str(int(self.decodes)),
            "FA_SPLIT_KEYS_ACROSS_WARPS": str(int(self.split_keys_across_warps)),
            "FA_COLUMN_WARPS": str(self.column_warps),
            "FA_VALUES_IN_KEYS": str(int(self.values_in_keys)),
            "FA_SWIZZLED": str(int(self.swizzled)),
            "FA_COMBINE_SHARED_BYTES": str(self.combine_bytes),
        }


@dataclass(frozen=True)
class BackwardConfig:
    """One variant of kernels/backward.cuh: which gradients it computes, of tiles of rows that are queries or keys."""

    include_folders: ClassVar = KERNEL_FOLDERS
    gradients: str  # "q", "kv", "k" or "v"
    arch: int
    dtype: str
    headdim: int  # columns of a tile of queries and keys; the call's headdim may be less
    headdim_v: int
    tile_m: int  # rows of a CTA: queries, or keys
    tile_n: int  # of a tile that they meet: keys, or queries
    num_warps: int
    num_stages: int  # such tiles in shared memory
    min_ctas: int
    num_value_parts: int  # CTAs that share the columns of a gradient
    modifies_scores: bool
    drops: bool
    block_sparse: bool = False  # there is a block mask
    mixes_blocks: bool = False  # rows of a CTA lie in several of its rows of blocks

    source: ClassVar[str] = "backward.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_backward", self.num_threads, self.shared_bytes),)

    @property
    def rows_are_keys(self) -> bool:
        """Otherwise they are queries."""
        return self.gradients != "q"

    @property
    def differentiates_scores(self) -> bool:
        """Gradients of values need none of scores."""
        return self.gradients != "v"

    @property
    def element_bytes(self) -> int:
        """Of an element in shared memory: Pascal's floats, unless they are too many."""
        is_wide = max(self.headdim, self.headdim_v) > _WIDEST_AS_FLOATS_IN_BACKWARDS
        return 2 if is_wide else ARCH_FACTS[self.arch].shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA; the kernel asserts the same."""
        first, second = (columns * self.element_bytes + 16 for columns in (self.headdim, self.headdim_v))
        rows = first + second if self.differentiates_scores else max(first, 2 * self.headdim_v + 16)
        stats = 4 * (1 + self.differentiates_scores + self.modifies_scores)
        of_row, of_column = (0, stats) if self.rows_are_keys else (stats, 0)
        tiles = self.num_stages * self.tile_n * (first + second + of_column)
        return self.tile_m * (rows + of_row) + tiles + _block_list_bytes(self)

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold scores and gradients."""
        facts = ARCH_FACTS[self.arch]
        steps = self.tile_m // (self.num_warps * facts.step_rows)
        gradients = self.headdim * self.differentiates_scores + self.headdim_v * ("v" in self.gradients)
        scores = self.tile_n * (1 + self.differentiates_scores + self.modifies_scores)
        return steps * (gradients // self.num_value_parts + scores) // 8 * facts.elements

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        features = (
            "_scores" * self.modifies_scores
            + "_drops" * self.drops
            + "_blocks" * self.block_sparse
            + "_mixed" * self.mixes_blocks
        )
        return (
            f"backward_{self.gradients}_sm{self.arch}_{self.dtype}_d{self.headdim}x{self.headdim_v}_m{self.tile_m}"
            f"n{self.tile_n}w{self.num_warps}s{self.num_stages}b{self.min_ctas}p{self.num_value_parts}{features}"
        )

    def macros(self) -> dict[str, str]:
        """What kernels/variant.cuh and kernels/gradient_rows.cuh are compiled with."""
        off = dict.fromkeys(
            (
                "FA_INT8_PRODUCTS",
                "FA_CACHE_FORMAT",
                "FA_QUERIES_IN_REGISTERS",
                "FA_PAGED",
                "FA_GROUPED_ROWS",
                "FA_SPLIT_KEYS_ACROSS_WARPS",
                "FA_VALUES_IN_KEYS",
                "FA_SWIZZLED",
            ),
            "0",
        )
        return {
            **_tile_macros(self),
            **off,
            "FA_COLUMN_WARPS": "1",
            "FA_ROWS_ARE_KEYS": str(int(self.rows_are_keys)),
            "FA_GRAD_FIRST": str(int(self.differentiates_scores)),
            "FA_GRAD_SECOND": str(int("v" in self.gradients)),
        }


def _block_list_bytes(config: KernelConfig | BackwardConfig) -> int:
    """The list of kept blocks of kernels/tile_walk.cuh, in shared memory."""
    entries = config.num_warps + config.num_threads + 1
    return -(-entries // 4) * 16 if config.block_sparse else 0


def _tile_macros(config: KernelConfig | BackwardConfig) -> dict[str, str]:
    return {
        "FA_ARCH_HEADER": f'"arch/sm{config.arch}.cuh"',
        "FA_BFLOAT16": str(int(config.dtype == "bfloat16")),
        "FA_BFLOAT16_OPERANDS": str(int(config.dtype == "bfloat16" and config.arch >= 80)),
        "FA_HEADDIM": str(config.headdim),
        "FA_HEADDIM_V": str(config.headdim_v),
        "FA_TILE_M": str(config.tile_m),
        "FA_TILE_N": str(config.tile_n),
        "FA_WARPS": str(config.num_warps),
        "FA_STAGES": str(config.num_stages),
        "FA_MIN_CTAS": str(config.min_ctas),
        "FA_VALUE_PARTS": str(config.num_value_parts),
        "FA_ELEMENT_BYTES": str(config.element_bytes),
        "FA_MODIFIES": str(int(config.modifies_scores)),
        "FA_DROPS": str(int(config.drops)),
        "FA_BLOCK_SPARSE": str(int(config.block_sparse)),
        "FA_MIXES_BLOCKS": str(int(config.mixes_blocks)),
        "FA_SHARED_BYTES": str(config.shared_bytes),
    }


def stored_columns(headdim: int) -> int:
    """Bytes of a query or key for products in int8: a multiple of what is copied at once."""
    return -(-headdim // 16) * 16


def lanes_for(columns: int) -> int:
    """Lanes that read a row, eight elements each: a power of two, so that a warp has whole rows."""
    return 1 << (-(-columns // 8) - 1).bit_length()


@dataclass(frozen=True)
class DeltaConfig:
    """One variant of kernels/delta.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    dtype: str
    lanes_of_row: int  # neighbours that read a row, eight elements each

    source: ClassVar[str] = "delta.cuh"

    @property
    def rows_of_cta(self) -> int:
        """Rows that a CTA takes."""
        return DELTA_WARPS * 32 // self.lanes_of_row

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        return f"delta_{self.dtype}_{self.lanes_of_row}"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_delta", 32 * DELTA_WARPS, 0),)

    def macros(self) -> dict[str, str]:
        """What kernels/element.cuh and kernels/delta.cuh are compiled with."""
        return {
            "FA_BFLOAT16": str(int(self.dtype == "bfloat16")),
            "FA_CACHE_FORMAT": _CACHE_FORMAT_NUMBERS[""],
            "FA_LANES_OF_ROW": str(self.lanes_of_row),
        }


@dataclass(frozen=True)
class QuantizeConfig:
    """One variant of kernels/quantize_rows.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    dtype: str  # of queries and keys
    lanes_of_row: int  # neighbours that read a row, eight elements each

    source: ClassVar[str] = "quantize_rows.cuh"

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        return f"quantize_{self.dtype}_{self.lanes_of_row}"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The sums of keys; then queries and keys become bytes."""
        names = "fastattention_sum_keys", "fastattention_quantize_rows"
        return tuple(Entry(name, QUANTIZE_THREADS, self._shared_bytes) for name in names)

    @property
    def _shared_bytes(self) -> int:
        return QUANTIZE_THREADS * 8 * 4

    def macros(self) -> dict[str, str]:
        """What kernels/element.cuh and kernels/quantize_rows.cuh are compiled with."""
        return {
            "FA_BFLOAT16": str(int(self.dtype == "bfloat16")),
            "FA_CACHE_FORMAT": _CACHE_FORMAT_NUMBERS["int8"],
            "FA_LANES_OF_ROW": str(self.lanes_of_row),
            "FA_SHARED_BYTES": str(self._shared_bytes),
        }


@dataclass(frozen=True)
class AppendConfig:
    """One variant of kernels/append.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    dtype: str  # of q, k, v and the rotary tables: "float16" or "bfloat16"
    cache_format: str = ""  # of a quantized cache: "int8" or "float8"
    columns: int = WIDEST_OF_A_WARP  # of a row of keys or values, at most; a multiple of 32

    @staticmethod
    def columns_for(headdim: int, headdim_v: int) -> int:
        """One of two sizes: few variants."""
        return AppendConfig.columns if max(headdim, headdim_v) <= AppendConfig.columns else MAX_HEADDIM

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        return f"append_{self.dtype}_{self.columns}" + (f"_{self.cache_format}" if self.cache_format else "")

    @property
    def source(self) -> str:
        """The header in kernels/ that is compiled."""
        return "append.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_append", 32 * APPEND_WARPS, 0, overlaps=True),)

    def macros(self) -> dict[str, str]:
        """What kernels/element.cuh is compiled with."""
        return {
            "FA_BFLOAT16": str(int(self.dtype == "bfloat16")),
            "FA_CACHE_FORMAT": _CACHE_FORMAT_NUMBERS[self.cache_format],
            "FA_COLUMNS": str(self.columns),
        }


@dataclass(frozen=True)
class MergeConfig:
    """One variant of kernels/merge.cuh. dtypes: "float16", "bfloat16" or "float32", not both of the first two."""

    include_folders: ClassVar = KERNEL_FOLDERS
    parts_dtype: str
    out_dtype: str

    @property
    def name(self) -> str:
        """A readable name, unique among variants."""
        return f"merge_{self.parts_dtype}_to_{self.out_dtype}"

    @property
    def source(self) -> str:
        """The header in kernels/ that is compiled."""
        return "merge.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_merge", 32 * MERGE_WARPS, 0, overlaps=True),)

    def macros(self) -> dict[str, str]:
        """What kernels/element.cuh and kernels/merge.cuh are compiled with."""
        return {
            "FA_BFLOAT16": str(int("bfloat16" in (self.parts_dtype, self.out_dtype))),
            "FA_CACHE_FORMAT": _CACHE_FORMAT_NUMBERS[""],
            "FA_FLOAT32_PARTS": str(int(self.parts_dtype == "float32")),
            "FA_FLOAT32_OUT": str(int(self.out_dtype == "float32")),
        }


def why_not_fitting(config: KernelConfig | BackwardConfig, limits: Limits) -> str | None:
    """Why a GPU cannot run a configuration, or None."""
    if config.shared_bytes > limits.shared_per_cta:
        return f"{config.shared_bytes} bytes of shared memory, the GPU has {limits.shared_per_cta} a CTA"
    if config.min_ctas * config.shared_bytes > limits.shared_per_sm:
        return f"{config.min_ctas} CTAs of {config.shared_bytes} bytes, the GPU has {limits.shared_per_sm}"
    registers = limits.registers_per_sm // (config.num_threads * config.min_ctas)
    if config.accumulators > min(registers, MAX_REGISTERS) - 24:
        return f"{config.accumulators} registers of accumulators, a thread has {min(registers, MAX_REGISTERS)}"
    return None
