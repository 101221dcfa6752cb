"""The ways of a warp through a kernel: before the loop over tiles of keys, through it for each kind of tile, after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .flow import Block, Loop, count_hmma, epilogue, main_loop, prologue, steady_path
from .launch import TileKind
from .sass import Function, Instruction

_MASKING = ("FSEL", "SEL", "MOV", "IMAD.MOV.U32")  # with -INF


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
    """The ways through a kernel.

    trips: how often inner loops run, by the address of their header; needed for those with HMMA instructions.
    Raises ValueError when the control flow is not that of an attention kernel.
    """
    loop, trips = main_loop(function), trips or {}
    full = steady_path(loop, trips)
    tiles = {
        TileKind.FULL: full,
        TileKind.MASKED: _masked(loop, trips, full),
        TileKind.SKIPPED: _skipped(loop, trips, full),
    }
    return Paths(prologue(function, loop, trips), tiles, epilogue(function, loop, trips))


def _masked(loop: Loop, trips: Mapping[int, int], full: list[Instruction]) -> list[Instruction]:
    """With the diagonal through the tile: the shortest way past blocks that put -infinity into scores.

    Where the way without masks passes such blocks, every tile is masked and there is no other way.
    """
    usual = {instruction.address for instruction in full}
    counts = {a: _count_masking(block) for a, block in loop.blocks.items() if a not in usual}
    most = max(counts.values(), default=0)
    ways = []
    for address, count in counts.items():
        if count >= max(8, most // 2):
            ways.append(steady_path(loop, trips, through={address}))
    return min(ways, key=len, default=full)


def _count_masking(block: Block) -> int:
    return sum(i.opcode.startswith(_MASKING) and "-INF" in i.text for i in block.instructions)


def _skipped(loop: Loop, trips: Mapping[int, int], full: list[Instruction]) -> list[Instruction]:
    """Past all blocks with HMMA, where there is such a way."""
    blocks = {address for address, block in loop.blocks.items() if count_hmma(block.instructions)}
    try:
        return steady_path(loop, trips, around=blocks)
    except ValueError:
        return full
