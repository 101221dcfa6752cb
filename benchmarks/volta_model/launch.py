"""A kernel's launch: the problem, the shape of its CTAs, the number that an SM holds, and the work of each of them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .chip import Chip


@dataclass(frozen=True)
class Problem:
    """Self attention in float16: as many keys as queries, as many key heads as query heads."""

    seqlen: int
    batch_size: int
    nheads: int
    headdim: int
    causal: bool

    @property
    def useful_flops(self) -> float:
        """Floating-point operations, without those of masked scores."""
        scores = self.seqlen * (self.seqlen + 1) / 2 if self.causal else float(self.seqlen) ** 2
        return 4.0 * scores * self.headdim * self.nheads * self.batch_size

    @property
    def bytes_moved(self) -> int:
        """Least bytes between DRAM and the chip: q, k and v read once, out written once."""
        return 4 * 2 * self.seqlen * self.headdim * self.nheads * self.batch_size

    @property
    def name(self) -> str:
        """Readable: "d64 causal S4096 B1 H16"."""
        mask = " causal" if self.causal else ""
        return f"d{self.headdim}{mask} S{self.seqlen} B{self.batch_size} H{self.nheads}"


class TileKind(enum.Enum):
    """What a warp does with a tile of keys."""

    FULL = "full"  # full for every warp of the CTA
    TESTED = "tested"  # full, but not for every warp: runs code that checks each warp for a mask
    MASKED = "masked"  # the diagonal goes through it
    SKIPPED = "skipped"  # it lies above the diagonal of the warp's rows, but not of another warp's


@dataclass(frozen=True)
class Launch:
    """The shape of a kernel's CTAs, and the resources of an SM that they take."""

    tile_m: int  # query rows
    tile_n: int  # keys
    num_warps: int
    registers: int  # per thread
    shared_bytes: int  # per CTA, static and dynamic
    # Query rows whose part of a tile a warp masks by itself; tile_m where all warps of a CTA do the same.
    mask_rows: int
    # Whether a tile of keys that ends where the warp's rows begin, or one key further on, counts as masked.
    masks_touching: bool = False
    value_parts: int = 1  # CTAs that share a tile of queries, each with a part of the columns of v
    # Heads whose CTAs start together, those that see the most keys first, and how many start so before the last.
    # None: head by head, first queries first.
    waves: Callable[[Problem], tuple[int, int]] | None = None

    def residents(self, chip: Chip) -> int:
        """CTAs that an SM holds at a time. Raises ValueError when it cannot hold one."""
        unit = chip.register_unit
        warp_registers = -(-self.registers * chip.warp_threads // unit) * unit
        # Each scheduler has a quarter of the registers, and warps go to schedulers in turn.
        warps = chip.registers // chip.num_schedulers // warp_registers * chip.num_schedulers
        shared = -(-self.shared_bytes // chip.shared_unit) * chip.shared_unit
        number = min(
            warps // self.num_warps,
            chip.shared_bytes // shared if shared else chip.max_ctas,
            chip.max_warps // self.num_warps,
            chip.max_ctas,
        )
        if number == 0:
            raise ValueError(
                f"a CTA of {self.num_warps} warps, {self.registers} registers, {shared} bytes does not fit"
            )
        return number

    def num_m_tiles(self, problem: Problem) -> int:
        """Tiles of queries of one head."""
        return -(-problem.seqlen // self.tile_m)

    def num_ctas(self, problem: Problem) -> int:
        """CTAs of the grid."""
        return self.num_m_tiles(problem) * problem.nheads * problem.batch_size * self.value_parts

    def kinds(self, problem: Problem, m_tile: int, warp: int) -> Iterator[TileKind]:
        """What a warp does with each tile of keys that its CTA goes through, in order."""
        begin, end = m_tile * self.tile_m, min((m_tile + 1) * self.tile_m, problem.seqlen)
        first_row = begin + warp * self.tile_m // self.num_warps // self.mask_rows * self.mask_rows
        last_row = min(first_row + self.mask_rows, end) - 1
        num_keys = end if problem.causal else problem.seqlen
        touching = 0 if self.masks_touching else 2
        for key in range(0, num_keys, self.tile_n):
            after = key + self.tile_n
            if problem.causal and key > last_row:
                yield TileKind.SKIPPED
            elif after > problem.seqlen or (problem.causal and after >= first_row + touching):
                yield TileKind.MASKED
            elif problem.causal and after >= begin + touching:
                yield TileKind.TESTED
            else:
                yield TileKind.FULL

    def order(self, problem: Problem) -> Iterator[int]:
        """Tiles of queries, one for every CTA of the grid, in the order in which they start."""
        heads, tiles = problem.nheads * problem.batch_size, range(self.num_m_tiles(problem))
        if self.waves is None:
            return (tile for _ in range(heads) for tile in tiles for _ in range(self.value_parts))
        together, before_last = self.waves(problem)
        groups = [together] * (before_last // together) + [heads - before_last]
        return (tile for size in groups for tile in reversed(tiles) for _ in range(size * self.value_parts))

    def num_full(self, problem: Problem, m_tile: int) -> int:
        """Tiles of keys at the beginning that no warp of a CTA masks."""
        rows = [list(self.kinds(problem, m_tile, warp)) for warp in range(self.num_warps)]
        return next(
            (n for n, kinds in enumerate(zip(*rows, strict=True)) if set(kinds) != {TileKind.FULL}), len(rows[0])
        )
