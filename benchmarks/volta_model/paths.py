"""The ways of a warp through a kernel: before the loop over tiles of keys, once around it, after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .flow import Block, Loop, count_hmma, epilogue, main_loop, prologue, steady_path
from .launch import TileKind
from .sass import Function, Instruction

_SELECTING = {"FSEL", "SEL"}
_FEWEST_MASKED = 8  # scores of a lane: a block that masks has more, one that guards a row's maximum fewer


@dataclass(frozen=True)
class Paths:
    """Instructions that a warp executes."""

    prologue: list[Instruction]
    tiles: Mapping[TileKind, list[Instruction]]
    epilogue: list[Instruction]

    @property
    def hmma_of_tile(self) -> int:
        """Tensor-core instructions of a warp for a tile of keys."""
        return count_hmma(self.tiles[TileKind.FULL])


def find_paths(function: Function, trips: Mapping[int, int] | None = None) -> Paths:
    """The ways through a kernel whose branches explain themselves.

    The loop over tiles may hold a loop of its own over those that nothing masks; tiles that it leaves over then go
    through the rest of the outer one.

    trips: how often loops over parts of a tile run, by the address of their header; needed for those with HMMA.
    Raises ValueError when the control flow is not that of an attention kernel.
    """
    outer, trips = main_loop(function), dict(trips or {})
    over_full_tiles = [loop for loop in outer.inner if loop.hmma and loop.header not in trips]
    if len(over_full_tiles) > 1:
        raise ValueError(f"{function.name} has {len(over_full_tiles)} inner loops with HMMA; give their trips")
    trips |= {loop.header: 1 for loop in over_full_tiles}
    around = {loop.header for loop in over_full_tiles}
    full = steady_path(over_full_tiles[0] if over_full_tiles else outer, trips)
    tiles = {
        TileKind.FULL: full,
        TileKind.MASKED: _masked(outer, trips, full, around),
        TileKind.SKIPPED: _skipped(outer, trips, full),
    }
    return Paths(prologue(function, outer, trips), tiles, epilogue(function, outer, trips))


def _masked(loop: Loop, trips: Mapping[int, int], full: list[Instruction], around: set[int]) -> list[Instruction]:
    """With the diagonal through the tile: the shortest way past blocks that put -infinity into scores.

    Where the way without masks passes such blocks, every tile is masked and there is no other way.
    """
    usual = {instruction.address for instruction in full}
    counts = {a: _count_masking(block) for a, block in loop.blocks.items() if a not in usual}
    least = max(_FEWEST_MASKED, max(counts.values(), default=0) // 2)
    masking = [address for address, count in counts.items() if count >= least]
    ways = (steady_path(loop, trips, through={address}, around=around) for address in masking)
    return min(ways, key=len, default=full)


def _count_masking(block: Block) -> int:
    return sum(instruction.name in _SELECTING and "-INF" in instruction.text for instruction in block.instructions)


def _skipped(loop: Loop, trips: Mapping[int, int], full: list[Instruction]) -> list[Instruction]:
    """Past all blocks with HMMA, where there is such a way."""
    blocks = {address for address, block in loop.blocks.items() if count_hmma(block.instructions)}
    try:
        return steady_path(loop, trips, around=blocks)
    except ValueError:
        return full
