"""Chooses the tiles of a call: those that fit a chip's buffers and that the simulator finds fastest. Pure Python."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from fastattention.attention.problem import Problem
from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.mask_tile import MASK_TILE
from fastattention.backends.ascend.simulator.tiles import (
    CHUNK_KEYS,
    FLOAT32_BYTES,
    HeadShape,
    Tiling,
    cube_tiles,
    update_rows,
    vector_rows,
)
from fastattention.backends.ascend.simulator.whole_chip import estimate_cycles, predict
from fastattention.backends.ascend.simulator.workload import SimulatedCall, padded
from fastattention.errors import UnsupportedError

__all__ = ["BufferUse", "Tiling", "buffer_uses", "choose_tiling", "compiler_options", "tiling_for", "why_not_fit"]

OUTER_TILE_M = (16, 32, 64, 128, 256)
OUTER_TILE_N = (1024, 512, 256, 128, 64, 32, 16)
VECTOR_LOOPS = (1, 2, 4, 8)  # numbers of slices of a Vector's rows that the compiler supports
PRELOADS = (1, 2, 4)  # no workspace ahead, or one of the two numbers of workspaces that the compiler supports
MINIMUM = 16  # rows, keys or columns of any tile: the Cube's own
MASK_BYTES = 1  # bytes of an element of the mask tile
INT8_BYTES = 1
ROW_STATISTICS = 3  # floats a row: maximum, sum, correction
SIMULATED = 3  # candidates that are simulated: the best by the estimate
WORTH_MORE = 1.01  # a tiling with more buffers in flight or more synchronization must be predicted this much faster

# The cache of tilings keeps three leading bits of the sizes of calls. Above these limits the best tiling no longer
# changes.
LONGEST, MOST_HEADS = 8192, 64
MOST_ROW_BLOCKS = 64  # row blocks of a head; with more, larger tiles are better
SMALLEST_TILE_N = 64  # unless the keys or pages are fewer


@dataclass(frozen=True)
class BufferUse:
    """What a tiling takes of one buffer."""

    buffer: str
    parts: dict[str, int]  # bytes, copies included
    allowed: int

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def why_not_fit(
    tiling: Tiling,
    headdim: int,
    headdim_v: int,
    dtype: torch.dtype,
    chip: Chip,
    by_hand: bool = False,
    int8_cache: bool = False,
) -> str | None:
    """Why a chip's buffers do not hold a tiling: the buffer, its bytes and its limit. None when they do.

    by_hand: as buffer_uses takes it. int8_cache: k and v are in int8, and the rest in `dtype`.
    """
    for name in ("outer_tile_m", "outer_tile_n"):
        size = getattr(tiling, name)
        if size < MINIMUM or size & (size - 1):
            return f"{name}={size} is not possible; use a power of two from {MINIMUM} on"
    if not 1 <= tiling.inner_tile_m <= vector_rows(tiling, chip):
        return f"inner_tile_m={tiling.inner_tile_m} is not possible; use 1 to {vector_rows(tiling, chip)}"
    if tiling.preload < 1:
        return f"preload={tiling.preload} is not possible; use 1 or more"
    if tiling.outer_tile_m + tiling.outer_tile_n > MASK_TILE:
        return (
            f"outer_tile_m={tiling.outer_tile_m} and outer_tile_n={tiling.outer_tile_n} exceed the mask tile: "
            f"their sum may be {MASK_TILE}"
        )
    shape = HeadShape(padded(headdim), padded(headdim_v), dtype.itemsize, int8_cache=int8_cache)
    for use in buffer_uses(tiling, shape, chip, by_hand):
        if use.used > use.allowed:
            parts = ", ".join(f"{part} {size}" for part, size in use.parts.items())
            return f"{use.buffer} would hold {use.used} bytes ({parts}); {chip.name} allows {use.allowed}"
    return None


def buffer_uses(tiling: Tiling, shape: HeadShape, chip: Chip, by_hand: bool = False) -> list[BufferUse]:
    """What a tiling takes of every buffer of a core. Buffers of level 0 come first; the others depend on their sizes.

    by_hand: a kernel written by hand computes a slice of scores in place and has in L1 only the keys and values that it
        is about to multiply. A compiler keeps intermediates besides a slice, such as a widened mask or broadcast row
        maxima, so the count includes one more slice. Triton-Ascend, by its documentation, checks only single products
        against L1, so two of them may silently overflow it. Hence whole tiles of keys and values must fit, with
        everything else. Nor does it cut the columns of values, so a whole product with them must fit L0C.

    With an int8 cache the Vector units convert a whole tile of keys or values, half of it each, because the compiler
    may not cut it. The count includes one intermediate in float32.
    """
    rows, copies, size = tiling.outer_tile_m, tiling.num_buffers, shape.element_bytes
    cut = cube_tiles(tiling, shape, chip)
    depth = max(cut.qk_depth, MINIMUM)
    columns, keys = max(cut.pv_columns, MINIMUM), max(cut.pv_keys, MINIMUM)
    halves, whole = 2 * max(cut.qk_keys, columns), 0 if by_hand else shape.headdim_v
    slice_elements, vector = tiling.inner_tile_m * tiling.outer_tile_n, vector_rows(tiling, chip)
    level_0 = [
        BufferUse("L0A", {"queries or weights": 2 * rows * max(depth, keys) * size}, chip.l0a_bytes),
        BufferUse(
            "L0B",
            {"keys or values": 2 * size * max(max(cut.qk_keys, MINIMUM) * depth, keys * columns)},
            chip.l0b_bytes,
        ),
        BufferUse("L0C", {"scores or products": FLOAT32_BYTES * rows * max(halves, whole)}, chip.l0c_bytes),
    ]
    in_l1 = {
        "queries": rows * shape.headdim * size,
        "keys": copies * (cut.qk_keys if by_hand else tiling.outer_tile_n) * shape.headdim * size,
        "values": copies * (keys * columns if by_hand else tiling.outer_tile_n * shape.headdim_v) * size,
        "weights": rows * tiling.outer_tile_n * size,
    }
    in_ub = {
        "scores": copies * slice_elements * shape.score_bytes,
        "weights": copies * slice_elements * size,
        "mask": copies * slice_elements * MASK_BYTES,
        "intermediates": 0 if by_hand else slice_elements * FLOAT32_BYTES,
        "O": vector * shape.headdim_v * FLOAT32_BYTES,
        "product with values": update_rows(tiling, shape, chip) * shape.headdim_v * FLOAT32_BYTES,
        "row statistics": ROW_STATISTICS * vector * FLOAT32_BYTES,
    }
    if shape.int8_cache:
        elements = tiling.outer_tile_n * max(shape.headdim, shape.headdim_v) // chip.vectors_per_core
        in_ub["int8 keys or values"] = elements * (copies * INT8_BYTES + size + FLOAT32_BYTES)
    return [*level_0, BufferUse("L1", in_l1, chip.l1_bytes), BufferUse("UB", in_ub, chip.ub_bytes)]


@functools.lru_cache(maxsize=4096)
def choose_tiling(problem: Problem, chip: Chip) -> Tiling:
    """The tiling that the simulator finds fastest for a problem. Raises UnsupportedError when none fits."""
    return tiling_for(SimulatedCall.of(problem), chip, problem.page_block_size)


def tiling_for(
    workload: SimulatedCall, chip: Chip, page_block_size: int | None = None, by_hand: bool = False
) -> Tiling:
    """`choose_tiling` of a workload. page_block_size: tokens of a page, which limits tiles of keys; None without pages.

    by_hand: as buffer_uses takes it; our kernel goes through a compiler.
    """
    num_heads_k = max(_rounded(workload.batch_size * workload.nheads_k, MOST_HEADS), 1)
    representative = replace(
        workload,
        batch_size=1,
        seqlen_q=max(_rounded(workload.seqlen_q, LONGEST), 1),
        seqlen_k=max(_rounded(workload.seqlen_k, LONGEST), 1),
        nheads=num_heads_k * workload.group_size,
        nheads_k=num_heads_k,
        headdim=padded(workload.headdim),
        headdim_v=padded(workload.headdim_v),
        window_left=workload.window_left if workload.window_left < 0 else _rounded(workload.window_left, LONGEST),
        window_right=workload.window_right if workload.window_right < 1 else _rounded(workload.window_right, LONGEST),
    )
    longest_tile = LONGEST if page_block_size is None else padded(page_block_size)
    return _fastest(representative, chip, longest_tile, by_hand)


@functools.lru_cache(maxsize=1024)
def _fastest(workload: SimulatedCall, chip: Chip, longest_tile: int, by_hand: bool) -> Tiling:
    cost = {
        tiling: estimate_cycles(workload, tiling, chip) for tiling in _candidates(workload, chip, longest_tile, by_hand)
    }
    if not cost:
        raise UnsupportedError(
            f"headdim={workload.headdim}, headdim_v={workload.headdim_v} in {workload.dtype} fit no buffers of "
            f"{chip.name} at any tile size"
        )
    best = sorted(cost, key=lambda tiling: cost[tiling])[:SIMULATED]
    seconds = {tiling: predict(workload, tiling, chip).seconds for tiling in best}
    limit = WORTH_MORE * min(seconds.values())
    good = [tiling for tiling in best if seconds[tiling] <= limit]
    return min(good, key=lambda tiling: (tiling.preload, -tiling.outer_tile_n, seconds[tiling]))


def _candidates(workload: SimulatedCall, chip: Chip, longest_tile: int, by_hand: bool = False) -> Iterator[Tiling]:
    """The tilings that fit, and are not larger than the call."""
    most_rows = padded(workload.num_rows)
    most_keys = min(padded(workload.seqlen_k), longest_tile)
    fewest_rows = min(most_rows // MOST_ROW_BLOCKS, OUTER_TILE_M[-1])
    rows_of_tiles = [rows for rows in OUTER_TILE_M if fewest_rows <= rows <= most_rows]
    keys_of_tiles = [keys for keys in OUTER_TILE_N if min(most_keys, SMALLEST_TILE_N) <= keys <= most_keys]
    for rows, keys, multibuffer in itertools.product(rows_of_tiles, keys_of_tiles, (True, False)):
        inner = _best_slices(Tiling(rows, keys, rows, 1, multibuffer), workload, chip, by_hand)
        if inner is not None:
            for preload in PRELOADS if keys < workload.seqlen_k else PRELOADS[:1]:
                yield Tiling(rows, keys, inner, preload, multibuffer)


def _best_slices(tiling: Tiling, workload: SimulatedCall, chip: Chip, by_hand: bool) -> int | None:
    """Rows of a slice of a tiling: the fewest slices that fit; None when no number of them does."""
    call = (workload.headdim, workload.headdim_v, workload.dtype, chip, by_hand, workload.int8_cache)
    for loops in VECTOR_LOOPS:
        inner = tiling.outer_tile_m // chip.vectors_per_core // loops
        sliced = replace(tiling, inner_tile_m=inner)
        if inner and why_not_fit(sliced, *call) is None:
            return inner
    return None


def compiler_options(tiling: Tiling, chip: Chip) -> dict[str, object]:
    """Triton-Ascend's options for a tiling: the number of parts that each unit cuts its tile into, and buffering."""
    options: dict[str, object] = {
        "multibuffer": tiling.multibuffer,
        # Workspaces in global memory let Cube and Vector overlap; without this option those below have no effect.
        "limit_auto_multi_buffer_only_for_local_buffer": False,
        "enable_auto_bind_sub_block": True,  # both Vector units of a core, half of the rows each
        "tile_mix_vector_loop": vector_rows(tiling, chip) // tiling.inner_tile_m,
        "tile_mix_cube_loop": max(1, min(tiling.outer_tile_n // CHUNK_KEYS, VECTOR_LOOPS[-1])),
    }
    if tiling.preload > 1:
        options["set_workspace_multibuffer"] = tiling.preload
    return options


def _rounded(number: int, most: int) -> int:
    """A number rounded up to three leading bits, and at most `most`."""
    unit = 1 << max(number.bit_length() - 3, 0)
    return min(-(-number // unit) * unit, most)
