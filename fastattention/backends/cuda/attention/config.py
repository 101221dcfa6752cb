"""The configurations of kernels: attention, its backward, append, merge. C++ reads the fields that they name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fastattention.attention.problem import BLOCK_STEP, MAX_HEADDIM
from fastattention.backends.cuda.common.arch import ARCH_FACTS, COMMON_FOLDERS, MAX_REGISTERS
from fastattention.backends.cuda.common.tiles import Elements, PlainTiles, TileVariant
from fastattention.gpu_runtime.chips import Limits
from fastattention.gpu_runtime.variant import Entry, Variant
from fastattention.quantized import KEYS_OF_SCALE

KERNEL_FOLDERS: tuple[Path, ...] = (Path(__file__).parent / "kernels", *COMMON_FOLDERS)

CACHE_FORMATS: dict[torch.dtype | None, str] = {None: "", torch.int8: "int8", torch.float8_e4m3fn: "float8"}

# Head dimension beyond which warps or CTAs share out the columns of v.
WIDEST_OF_A_WARP = 256


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(TileVariant):
    """What the kernels of attention and of its backward have in common."""

    include_folders: ClassVar = KERNEL_FOLDERS
    block_step: ClassVar = BLOCK_STEP
    # Head dimension beyond which Pascal's tiles are no floats, but of 16 bits: more would not fit the 48 KB that a CTA
    # may have there.
    _widest_as_floats: ClassVar[int]

    headdim_v: int  # columns of a tile of values; of a forward, of a CTA
    tile_m: int  # rows of a CTA: queries, or keys
    tile_n: int  # of a tile that they meet: keys, or queries
    num_warps: int
    num_stages: int  # such tiles in shared memory
    min_ctas: int  # CTAs of a multiprocessor for which the compiler leaves registers
    column_warps: int = 1  # warps with the same rows, which share out the columns of v, or of gradients
    num_value_parts: int  # CTAs that share the columns of v, or of a gradient, where one has too few registers for all
    softcaps: bool = False
    has_alibi: bool = False
    has_bias: bool = False
    extreme_scores: bool = False  # softmax_scale or softcap are so large or small that only slow arithmetic is exact
    drops: bool = False  # dropout may be on
    block_sparse: bool = False  # there is a block mask
    mixes_blocks: bool = False  # rows of a CTA lie in several of its rows

    @property
    def rules(self) -> tuple[bool, bool, bool]:
        """How scores differ from products times a number: by softcap, ALiBi, bias."""
        return self.softcaps, self.has_alibi, self.has_bias

    @property
    def modifies_scores(self) -> bool:
        """Whether scores are more than products times a number."""
        return any(self.rules) or self.extreme_scores

    @property
    def stages_bias(self) -> bool:
        """Whether tiles of biases pass through shared memory (kernels/bias_tiles.cuh)."""
        return self.has_bias and self.arch >= 80

    @property
    def value_columns(self) -> int:
        """Columns of a tile of values, or of gradients of results."""
        return self.headdim_v

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in shared memory. Pascal keeps floats, unless they do not fit."""
        is_wide = max(self.headdim, self.headdim_v) > self._widest_as_floats
        return 2 if is_wide else ARCH_FACTS[self.arch].element_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        raise NotImplementedError

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold scores, results and operands; the rest of a kernel takes about 40 more."""
        raise NotImplementedError

    @property
    def row_warps(self) -> int:
        """Warps that share out the rows."""
        return self.num_warps // self.column_warps

    @property
    def warp_rows(self) -> int:
        """Rows of a warp."""
        return self.tile_m // self.row_warps

    @property
    def block_list_bytes(self) -> int:
        """The list of kept blocks of kernels/tile_walk.cuh, in shared memory."""
        entries = self.num_warps + 32 * self.num_warps + 1
        return -(-entries // 4) * 16 if self.block_sparse else 0


class CacheFormat:
    """Fields of a kernel that reads or writes a cache (kernels/cache_format.cuh)."""

    cache_format: str  # of a quantized cache: "int8" or "float8"; otherwise ""

    @property
    def quantized(self) -> bool:
        """Whether the cache is quantized."""
        return self.cache_format != ""

    @property
    def cache_is_int8(self) -> bool:
        """Whether the cache is int8; otherwise it is float8, or not quantized."""
        return self.cache_format == "int8"


@dataclass(frozen=True, kw_only=True)
class KernelConfig(CacheFormat, AttentionConfig):
    """One variant of kernels/forward.cuh or kernels/decode.cuh."""

    _widest_as_floats: ClassVar = 256
    combine_warps: ClassVar = 8  # of a CTA that merges the partial results of rows
    combine_teams: ClassVar = 2 * combine_warps  # half warps
    keys_of_scale: ClassVar = KEYS_OF_SCALE

    queries_in_registers: bool  # otherwise they are read from shared memory for every tile of keys
    paged: bool
    decodes: bool = False  # rows are those of all heads that share a key head, rather than the tokens of one
    cache_format: str = ""
    split_keys_across_warps: bool = False  # every warp has all rows and keys of its own, in a decode of few rows
    values_in_keys: bool = False  # v is the first columns of k, in the same memory
    int8_products: bool = False  # queries and keys are bytes (kernels/quantize_rows.cuh)

    @property
    def source(self) -> str:
        """The header in kernels/ that is compiled."""
        return "decode.cuh" if self.decodes else "forward.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its functions: a decode and the merge of its partial results, or a forward."""
        if not self.decodes:
            return (Entry("fastattention_forward", self.num_warps, self.shared_bytes),)
        return (
            Entry("fastattention_decode", self.num_warps, self.shared_bytes, overlaps=True),
            Entry("fastattention_combine", self.combine_warps, self.combine_bytes, overlaps=True),
        )

    @property
    def key_warps(self) -> int:
        """Warps that share out the keys of a tile of decode.cuh among themselves."""
        return self.num_warps if self.split_keys_across_warps else 1

    @property
    def row_warps(self) -> int:
        """Warps that share out the rows."""
        return self.num_warps // (self.key_warps * self.column_warps)

    @property
    def stages_bias(self) -> bool:
        """Whether tiles of biases pass through shared memory: not of few rows, which are bound by memory."""
        return super().stages_bias and not self.decodes and self.column_warps == 1

    @property
    def stream_tile(self) -> int:
        """Keys that a CTA takes at a time."""
        return self.tile_n * self.key_warps

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernels assert."""
        queries = self.tile_bytes(self.tile_m, self.key_columns, self.element_bytes)
        # Asynchronous copies leave a quantized cache as it is.
        cache_bytes = 1 if self.quantized and self.arch >= 80 else self.element_bytes
        tiles = self.tile_bytes(self.tile_n, self.key_columns, cache_bytes)
        if not self.values_in_keys:
            tiles += self.tile_bytes(self.tile_n, self.headdim_v, cache_bytes)
        scales = 8 * self.tile_n * self.quantized
        biases = self.tile_bytes(self.tile_m, self.tile_n) * self.stages_bias
        stages = self.key_warps * self.num_stages * (tiles + scales + biases)
        if self.column_warps > 1:
            stages += self.tile_bytes(self.tile_m, self.tile_n) + 4 * self.tile_m * self.column_warps
        if self.decodes:
            return queries + stages + 8 * self.tile_m * self.key_warps
        return max(queries, self.tile_bytes(self.tile_m, self.headdim_v)) + stages + self.block_list_bytes

    @property
    def key_columns(self) -> int:
        """Columns of a tile of queries or keys, in 16-bit elements. Each holds two bytes where int8 is multiplied."""
        return self.headdim // 2 if self.int8_products else self.headdim

    @property
    def combine_bytes(self) -> int:
        """Shared memory of a CTA that merges, which it asserts: of each half warp a row, its maximum and sum."""
        return self.combine_teams * (self.headdim_v * self.num_value_parts + 4) * 4

    @property
    def swizzled(self) -> bool:
        """Whether rows in shared memory are swizzled (kernels/shared_tile.cuh)."""
        return self.decodes and self.arch >= 80

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold scores, results and queries."""
        facts = ARCH_FACTS[self.arch]
        steps = self.warp_rows // facts.step_rows
        queries = self.headdim * facts.step_rows // 64 if self.queries_in_registers else 0
        columns = (self.tile_n + self.headdim_v) // self.column_warps
        return steps * (columns // 8 * facts.elements + queries)


@dataclass(frozen=True, kw_only=True)
class BackwardConfig(PlainTiles, AttentionConfig):
    """One variant of kernels/backward.cuh: which gradients it computes, of tiles of rows that are queries or keys."""

    _widest_as_floats: ClassVar = 128
    paged: ClassVar = False
    decodes: ClassVar = False
    split_keys_across_warps: ClassVar = False

    gradients: str  # "q", "kv", "k" or "v"; "qkv" sums those of queries in memory, in any order

    @property
    def source(self) -> str:
        """The header in kernels/ that is compiled."""
        return "summed_backward.cuh" if self.sums_queries else "backward.cuh"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its function, and where gradients of queries are summed, the one that rounds the sums."""
        backward = Entry("fastattention_backward", self.num_warps, self.shared_bytes)
        if not self.sums_queries:
            return (backward,)
        rounding = self.tile_bytes(self.num_warps * self.step_rows, self.rounded_columns)
        return backward, Entry("fastattention_round_queries", self.num_warps, rounding)

    @property
    def sums_queries(self) -> bool:
        """Whether rows are keys, and gradients of queries are summed in memory (kernels/query_sums.cuh)."""
        return self.gradients == "qkv"

    @property
    def query_parts(self) -> int:
        """Parts of the queries of a tile whose sums warps share out, besides columns; 0 if they cannot evenly."""
        for parts in (2, 4):
            if self.tile_n % (parts * self.step_rows) == 0 and self.headdim * parts % (16 * self.num_warps) == 0:
                return parts
        return 0

    @property
    def rounded_columns(self) -> int:
        """Columns of sums that a warp rounds at a time: all, or what fits its registers."""
        return self.headdim if self.headdim <= WIDEST_OF_A_WARP else 64

    @property
    def stages_bias(self) -> bool:
        """Whether tiles of biases pass through shared memory: those of two fragments or more."""
        return super().stages_bias and self.tile_n // self.column_warps >= 16

    def why_not_even(self) -> str | None:
        """Why warps cannot share out columns evenly, or None."""
        for columns in (self.headdim, self.headdim_v):
            if self.column_warps > 1 and columns % (16 * self.column_warps):
                return f"{self.column_warps} warps do not share out {columns} columns in sixteens"
        if self.sums_queries and not self.query_parts:
            return f"{self.num_warps} warps do not share out {self.tile_n} queries of {self.headdim} columns evenly"
        return None

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
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, which the kernel asserts."""
        first, second = (self.tile_bytes(1, columns, self.element_bytes) for columns in (self.headdim, self.headdim_v))
        rows = first + second if self.differentiates_scores else max(first, self.tile_bytes(1, self.headdim_v))
        stats = 4 * (1 + self.differentiates_scores + self.has_bias)
        of_row, of_column = (0, stats) if self.rows_are_keys else (stats, 0)
        tile = self.tile_n * (first + second + of_column)
        if self.stages_bias:
            columns = self.tile_n // self.column_warps
            queries, keys = (columns, self.warp_rows) if self.rows_are_keys else (self.warp_rows, columns)
            tile += self.num_warps * self.tile_bytes(queries, keys)
        shares = self.column_warps > 1
        left = self.differentiates_scores * (self.sums_queries or shares) + self.differentiates_values * shares
        left *= self.tile_bytes(self.tile_m, self.tile_n)
        return self.tile_m * (rows + of_row) + self.num_stages * tile + left + self.block_list_bytes

    @property
    def accumulators(self) -> int:
        """Registers of a thread that hold scores and gradients."""
        facts = ARCH_FACTS[self.arch]
        steps = self.warp_rows // facts.step_rows
        gradients = self.headdim * self.differentiates_scores + self.headdim_v * self.differentiates_values
        scores = self.tile_n * (1 + self.differentiates_scores + self.softcaps)
        columns = gradients // self.num_value_parts + scores
        return steps * columns // (8 * self.column_warps) * facts.elements


def stored_columns(headdim: int) -> int:
    """Bytes of a query or key for products in int8: a multiple of what is copied at once."""
    return -(-headdim // 16) * 16


def lanes_for(columns: int) -> int:
    """Lanes that read a row, eight elements at a time: a power of two, so that a warp has whole rows."""
    return min(32, 1 << (-(-columns // 8) - 1).bit_length())


@dataclass(frozen=True)
class DeltaConfig(Elements, Variant):
    """One variant of kernels/delta.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    source: ClassVar[str] = "delta.cuh"
    num_warps: ClassVar = 4

    dtype: torch.dtype
    lanes_of_row: int  # neighbours that read a row, eight elements each

    @property
    def rows_of_cta(self) -> int:
        """Rows that a CTA takes."""
        return self.num_warps * 32 // self.lanes_of_row

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_delta", self.num_warps, 0),)


@dataclass(frozen=True)
class QuantizeConfig(Elements, Variant):
    """One variant of kernels/quantize_rows.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    source: ClassVar[str] = "quantize_rows.cuh"
    num_warps: ClassVar = 4
    quantized: ClassVar = True
    cache_is_int8: ClassVar = True
    keys_of_scale: ClassVar = KEYS_OF_SCALE
    chunk_tokens: ClassVar = 512  # keys that a CTA sums up
    shared_bytes: ClassVar = num_warps * 32 * 8 * 4  # eight sums of a thread

    dtype: torch.dtype  # of queries and keys
    lanes_of_row: int  # neighbours that read a row, eight elements each

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its two functions: one sums keys, the other quantizes queries and keys."""
        names = "fastattention_sum_keys", "fastattention_quantize_rows"
        return tuple(Entry(name, self.num_warps, self.shared_bytes) for name in names)


@dataclass(frozen=True)
class AppendConfig(CacheFormat, Elements, Variant):
    """One variant of kernels/append.cuh."""

    include_folders: ClassVar = KERNEL_FOLDERS
    source: ClassVar[str] = "append.cuh"
    num_warps: ClassVar = 4

    dtype: torch.dtype  # of q, k, v and the rotary tables: float16 or bfloat16
    cache_format: str = ""
    columns: int = WIDEST_OF_A_WARP  # of a row of keys or values, at most; a multiple of 32

    @staticmethod
    def columns_for(headdim: int, headdim_v: int) -> int:
        """Columns of a variant for these head dimensions: one of two sizes, so that there are few variants."""
        return AppendConfig.columns if max(headdim, headdim_v) <= AppendConfig.columns else MAX_HEADDIM

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_append", self.num_warps, 0, overlaps=True),)


@dataclass(frozen=True)
class MergeConfig(Variant):
    """One variant of kernels/merge.cuh. dtypes: float16, bfloat16 or float32, not both of the first two."""

    include_folders: ClassVar = KERNEL_FOLDERS
    source: ClassVar[str] = "merge.cuh"
    num_warps: ClassVar = 4
    columns_of_warp: ClassVar = 128

    parts_dtype: torch.dtype
    out_dtype: torch.dtype

    @property
    def bfloat16(self) -> bool:
        """Whether parts or out are; otherwise 16 bits are float16."""
        return torch.bfloat16 in (self.parts_dtype, self.out_dtype)

    @property
    def float32_parts(self) -> bool:
        """Whether parts are."""
        return self.parts_dtype is torch.float32

    @property
    def float32_out(self) -> bool:
        """Whether out is."""
        return self.out_dtype is torch.float32

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Its one function."""
        return (Entry("fastattention_merge", self.num_warps, 0, overlaps=True),)


def why_not_fitting(config: AttentionConfig, limits: Limits) -> str | None:
    """Why a GPU cannot run a configuration, or None."""
    if config.block_sparse and (config.block_step % config.tile_n or config.block_step % config.warp_rows):
        return f"{config.warp_rows} rows of a warp and {config.tile_n} columns do not lie in one block each"
    if isinstance(config, BackwardConfig) and (reason := config.why_not_even()) is not None:
        return reason
    if config.shared_bytes > limits.shared_per_cta:
        return f"{config.shared_bytes} bytes of shared memory, the GPU has {limits.shared_per_cta} a CTA"
    if config.min_ctas * config.shared_bytes > limits.shared_per_sm:
        return f"{config.min_ctas} CTAs of {config.shared_bytes} bytes, the GPU has {limits.shared_per_sm}"
    registers = limits.registers_per_sm // (32 * config.num_warps * config.min_ctas)
    if config.accumulators > min(registers, MAX_REGISTERS) - 24:
        return f"{config.accumulators} registers of accumulators, a thread has {min(registers, MAX_REGISTERS)}"
    return None
