"""The configurations of kernels: attention, its backward, append, merge. C++ reads the fields that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.attention.problem import MAX_HEADDIM
from fastattention.backends.cuda.common.arch import ARCH_FACTS, COMMON_FOLDERS, MAX_REGISTERS, PLAIN_TILES
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.variant import Entry, Variant

KERNEL_FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)

CACHE_FORMATS: dict[torch.dtype | None, str] = {None: "", torch.int8: "int8", torch.float8_e4m3fn: "float8"}

# Head dimension beyond which warps or CTAs share out the columns of v.
WIDEST_OF_A_WARP = 256
# Head dimension beyond which Pascal's tiles have 16-bit elements: floats would not fit the 48 KB of a CTA there.
_WIDEST_AS_FLOATS, _WIDEST_AS_FLOATS_IN_BACKWARDS = 256, 128
COMBINE_WARPS = 8  # warps of a CTA that merges the partial results of rows
COMBINE_TEAMS = 2 * COMBINE_WARPS  # half warps
APPEND_WARPS = 4
MERGE_WARPS = 4
MERGE_COLUMNS = 128  # columns that each of them takes
DELTA_WARPS = 4
QUANTIZE_THREADS = 128


@dataclass(frozen=True)
class KernelConfig(Variant):
    """One variant of kernels/forward.cuh or kernels/decode.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    exports: ClassVar = (
        "key_columns", "value_columns", "bfloat16", "bfloat16_operands", "quantized", "cache_is_int8", "swizzled",
        "element_bytes", "shared_bytes", "combine_bytes",
    )  # fmt: skip
    constants: ClassVar = {"combine_warps": COMBINE_WARPS}

    arch: int  # code path: 60, 70, 75 or 80
    dtype: str  # "float16" or "bfloat16"
    headdim: int  # columns of a tile of queries and keys; the call's headdim may be less
    headdim_v: int  # columns of v of a CTA; the call's headdim_v may be less
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
    decodes: bool = False  # rows are the queries of all heads that share a key head, rather than the tokens of one head
    cache_format: str = ""  # format of a quantized cache: "int8" or "float8"
    split_keys_across_warps: bool = False  # every warp has all rows and keys of its own, in a decode of few rows
    column_warps: int = 1  # warps with the same rows, which share out the columns of v
    values_in_keys: bool = False  # v is the first columns of k, in the same memory
    block_sparse: bool = False  # there is a block mask
    mixes_blocks: bool = False  # rows of a CTA lie in several of its rows
    int8_products: bool = False  # queries and keys are bytes (kernels/quantize_rows.cuh)

    @property
    def bfloat16(self) -> bool:
        """Whether q, k, v and out are bfloat16; otherwise they are float16."""
        return self.dtype == "bfloat16"

    @property
    def bfloat16_operands(self) -> bool:
        """Whether matrix products take bfloat16 as it is."""
        return self.bfloat16 and self.arch >= 80

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values."""
        return self.headdim_v

    @property
    def quantized(self) -> bool:
        """Whether the cache is quantized."""
        return self.cache_format != ""

    @property
    def cache_is_int8(self) -> bool:
        """Whether the cache is int8; otherwise it is float8, or not quantized."""
        return self.cache_format == "int8"

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
        """Bytes of an element in shared memory. Pascal keeps floats, unless they do not fit."""
        return 2 if self.headdim > _WIDEST_AS_FLOATS else ARCH_FACTS[self.arch].shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernels assert."""
        size = self.element_bytes
        query_pitch = self._pitch(self.key_columns, size)
        # Asynchronous copies leave a quantized cache as it is.
        cache_size = 1 if self.cache_format and self.arch >= 80 else size
        key_bytes = self._pitch(self.key_columns, cache_size)
        if not self.values_in_keys:
            key_bytes += self._pitch(self.headdim_v, cache_size)
        stages = self.key_warps * self.num_stages * self.tile_n * (key_bytes + 8 * bool(self.cache_format))
        exchange = self._pitch(self.tile_n, 2) + 4 * self.column_warps if self.column_warps > 1 else 0
        if self.decodes:
            return self.tile_m * (query_pitch + exchange + 8 * self.key_warps) + stages
        rows = self.tile_m * (max(query_pitch, self._pitch(self.headdim_v, 2)) + exchange)
        return rows + stages + _block_list_bytes(self)

    @property
    def key_columns(self) -> int:
        """Columns of a tile of queries or keys, in 16-bit elements. Each holds two bytes where int8 is multiplied."""
        return self.headdim // 2 if self.int8_products else self.headdim

    @property
    def combine_bytes(self) -> int:
        """Shared memory of a CTA that merges, which it asserts: a row, its maximum and its sum for each half warp."""
        return COMBINE_TEAMS * (self.headdim_v * self.num_value_parts + 4) * 4

    @property
    def swizzled(self) -> bool:
        """Whether rows in shared memory are swizzled (kernels/shared_tile.cuh)."""
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


@dataclass(frozen=True)
class BackwardConfig(Variant):
    """One variant of kernels/backward.cuh: which gradients it computes, of tiles of rows that are queries or keys."""

    include_folders: ClassVar = KERNEL_FOLDERS
    exports: ClassVar = (
        "key_columns", "value_columns", "bfloat16", "bfloat16_operands", "element_bytes", "shared_bytes",
        "rows_are_keys", "differentiates_scores", "differentiates_values",
    )  # fmt: skip
    constants: ClassVar = PLAIN_TILES | {"paged": False, "decodes": False, "split_keys_across_warps": False}

    gradients: str  # "q", "kv", "k" or "v"
    arch: int
    dtype: str
    headdim: int  # columns of a tile of queries and keys; the call's headdim may be less
    headdim_v: int
    tile_m: int  # rows of a CTA: queries, or keys
    tile_n: int  # rows of a tile that they meet: keys, or queries
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
    def bfloat16(self) -> bool:
        """Whether q, k, v and out are bfloat16; otherwise they are float16."""
        return self.dtype == "bfloat16"

    @property
    def bfloat16_operands(self) -> bool:
        """Whether matrix products take bfloat16 as it is."""
        return self.bfloat16 and self.arch >= 80

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values, or of gradients of results."""
        return self.headdim_v

    @property
    def key_columns(self) -> int:
        """Columns of a tile of queries or keys."""
        return self.headdim

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_backward", self.num_threads, self.shared_bytes),)

    @property
    def rows_are_keys(self) -> bool:
        """Whether rows are keys; otherwise they are queries."""
        return self.gradients != "q"

    @property
    def differentiates_scores(self) -> bool:
        """Whether gradients of scores are computed. Gradients of values need none."""
        return self.gradients != "v"

    @property
    def differentiates_values(self) -> bool:
        """Whether gradients of values are computed."""
        return "v" in self.gradients

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in shared memory. Pascal keeps floats, unless they do not fit."""
        is_wide = max(self.headdim, self.headdim_v) > _WIDEST_AS_FLOATS_IN_BACKWARDS
        return 2 if is_wide else ARCH_FACTS[self.arch].shared_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
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
        gradients = self.headdim * self.differentiates_scores + self.headdim_v * self.differentiates_values
        scores = self.tile_n * (1 + self.differentiates_scores + self.modifies_scores)
        return steps * (gradients // self.num_value_parts + scores) // 8 * facts.elements

    @property
    def num_threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps


def _block_list_bytes(config: KernelConfig | BackwardConfig) -> int:
    """The list of kept blocks of kernels/tile_walk.cuh, in shared memory."""
    entries = config.num_warps + config.num_threads + 1
    return -(-entries // 4) * 16 if config.block_sparse else 0


def stored_columns(headdim: int) -> int:
    """Bytes of a query or key for products in int8: a multiple of what is copied at once."""
    return -(-headdim // 16) * 16


def lanes_for(columns: int) -> int:
    """Lanes that read a row, eight elements each: a power of two, so that a warp has whole rows."""
    return 1 << (-(-columns // 8) - 1).bit_length()


@dataclass(frozen=True)
class DeltaConfig(Variant):
    """One variant of kernels/delta.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    exports: ClassVar = ("bfloat16",)
    constants: ClassVar = {"num_warps": DELTA_WARPS}
    dtype: str
    lanes_of_row: int  # neighbours that read a row, eight elements each

    source: ClassVar[str] = "delta.cuh"

    @property
    def bfloat16(self) -> bool:
        """Whether q, k, v and out are bfloat16; otherwise they are float16."""
        return self.dtype == "bfloat16"

    @property
    def rows_of_cta(self) -> int:
        """Rows that a CTA takes."""
        return DELTA_WARPS * 32 // self.lanes_of_row

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_delta", 32 * DELTA_WARPS, 0),)


@dataclass(frozen=True)
class QuantizeConfig(Variant):
    """One variant of kernels/quantize_rows.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    exports: ClassVar = ("bfloat16", "shared_bytes")
    constants: ClassVar = {"num_threads": QUANTIZE_THREADS, "quantized": True, "cache_is_int8": True}
    dtype: str  # of queries and keys
    lanes_of_row: int  # neighbours that read a row, eight elements each

    source: ClassVar[str] = "quantize_rows.cuh"

    @property
    def bfloat16(self) -> bool:
        """Whether q, k, v and out are bfloat16; otherwise they are float16."""
        return self.dtype == "bfloat16"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its two functions: one sums keys, the other quantizes queries and keys."""
        names = "fastattention_sum_keys", "fastattention_quantize_rows"
        return tuple(Entry(name, QUANTIZE_THREADS, self.shared_bytes) for name in names)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA: eight sums of a thread."""
        return QUANTIZE_THREADS * 8 * 4


@dataclass(frozen=True)
class AppendConfig(Variant):
    """One variant of kernels/append.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    source: ClassVar[str] = "append.cuh"
    exports: ClassVar = ("bfloat16", "quantized", "cache_is_int8")
    constants: ClassVar = {"num_warps": APPEND_WARPS}
    dtype: str  # of q, k, v and the rotary tables: "float16" or "bfloat16"
    cache_format: str = ""  # format of a quantized cache: "int8" or "float8"
    columns: int = WIDEST_OF_A_WARP  # most columns of a row of keys or values; a multiple of 32

    @staticmethod
    def columns_for(headdim: int, headdim_v: int) -> int:
        """Columns of a variant for these head dimensions: one of two sizes, so that there are few variants."""
        return AppendConfig.columns if max(headdim, headdim_v) <= AppendConfig.columns else MAX_HEADDIM

    @property
    def bfloat16(self) -> bool:
        """Whether q, k, v and out are bfloat16; otherwise they are float16."""
        return self.dtype == "bfloat16"

    @property
    def quantized(self) -> bool:
        """Whether the cache is quantized."""
        return self.cache_format != ""

    @property
    def cache_is_int8(self) -> bool:
        """Whether the cache is int8; otherwise it is float8, or not quantized."""
        return self.cache_format == "int8"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_append", 32 * APPEND_WARPS, 0, overlaps=True),)


@dataclass(frozen=True)
class MergeConfig(Variant):
    """One variant of kernels/merge.cuh. dtypes: "float16", "bfloat16" or "float32", not both of the first two."""

    include_folders: ClassVar = KERNEL_FOLDERS
    source: ClassVar[str] = "merge.cuh"
    exports: ClassVar = ("bfloat16", "float32_parts", "float32_out")
    constants: ClassVar = {"num_warps": MERGE_WARPS, "columns_of_warp": MERGE_COLUMNS}
    parts_dtype: str
    out_dtype: str

    @property
    def bfloat16(self) -> bool:
        """Whether parts or out are bfloat16; otherwise 16-bit tensors are float16."""
        return "bfloat16" in (self.parts_dtype, self.out_dtype)

    @property
    def float32_parts(self) -> bool:
        """Whether parts are float32."""
        return self.parts_dtype == "float32"

    @property
    def float32_out(self) -> bool:
        """Whether out is float32."""
        return self.out_dtype == "float32"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_merge", 32 * MERGE_WARPS, 0, overlaps=True),)


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
