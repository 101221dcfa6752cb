"""The paths of a warp through a kernel: before the loop over tiles of keys, once around it, after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .flow import Block, Loop, count_hmma, epilogue, loops_after, main_loop, prologue, steady_path
from .launch import TileKind
from .sass import Function, Instruction

_SELECTING = {"FSEL", "SEL"}
_FEWEST_MASKED = 8  # scores of a lane; a block that masks has more, a block that guards a row's maximum fewer


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


def find_paths(function: Function, stored_bytes: int) -> Paths:
    """The paths through a kernel whose branches tell them.

    stored_bytes: bytes of results that a thread stores after the loop over tiles. They give the trip count of a loop
    that stores. Raises ValueError when the control flow is not that of an attention kernel.
    """
    outer = main_loop(function)
    trips = _storing_trips(function, outer, stored_bytes)
    return Paths(prologue(function, outer, trips), find_tiles(function), epilogue(function, outer, trips))


def _storing_trips(function: Function, outer: Loop, stored_bytes: int) -> dict[int, int]:
    """Trip count of the loop that stores the results, for any number of rows a trip."""
    trips = {}
    for loop in loops_after(function, outer):
        stored = _stored(loop)
        if stored:
            if stored_bytes % stored:
                raise ValueError(
                    f"the loop at {loop.header:#x} stores {stored} bytes a trip, no divisor of {stored_bytes}"
                )
            trips[loop.header] = stored_bytes // stored
    return trips


def _stored(loop: Loop) -> int:
    """Bytes that a thread stores once around a loop."""
    if not any(instruction.name == "STG" for block in loop.blocks.values() for instruction in block.instructions):
        return 0
    return sum(instruction.width for instruction in steady_path(loop, {}) if instruction.name == "STG")


def find_tiles(function: Function) -> dict[TileKind, list[Instruction]]:
    """The paths once around the loop over tiles of keys, by the kind of the tile.

    That loop may contain an inner loop over unmasked tiles; remaining tiles go through the rest of the outer loop.
    Raises ValueError when the control flow is not that of an attention kernel.
    """
    outer = main_loop(function)
    over_full_tiles = [loop for loop in outer.inner if loop.hmma]
    if len(over_full_tiles) > 1:
        raise ValueError(f"{function.name} has {len(over_full_tiles)} inner loops with HMMA, not one over full tiles")
    trips = {loop.header: 1 for loop in over_full_tiles}
    full = steady_path(over_full_tiles[0] if over_full_tiles else outer, trips)
    masking = _masking_blocks(outer, full)
    masked = _masked(outer, trips, full, masking)
    return {
        TileKind.FULL: full,
        TileKind.TESTED: _tested(outer, trips, full, masked, masking),
        TileKind.MASKED: masked,
        TileKind.SKIPPED: _skipped(outer, trips, full),
    }


def _masking_blocks(loop: Loop, full: list[Instruction]) -> set[int]:
    """Blocks off the path of full tiles that write -infinity to scores."""
    usual = {instruction.address for instruction in full}
    counts = {a: _count_masking(block) for a, block in loop.blocks.items() if a not in usual}
    least = max(_FEWEST_MASKED, max(counts.values(), default=0) // 2)
    return {address for address, count in counts.items() if count >= least}


def _count_masking(block: Block) -> int:
    return sum(instruction.name in _SELECTING and "-INF" in instruction.text for instruction in block.instructions)


def _masked(loop: Loop, trips: Mapping[int, int], full: list[Instruction], masking: set[int]) -> list[Instruction]:
    """The path of a tile that the diagonal crosses: the shortest through blocks that mask.

    Where the path without masks contains such blocks, every tile is masked and there is no other path.
    """
    ways = (steady_path(loop, trips, through={address}, around=set(trips)) for address in masking)
    return min(ways, key=len, default=full)


def _tested(
    loop: Loop, trips: Mapping[int, int], full: list[Instruction], masked: list[Instruction], masking: set[int]
) -> list[Instruction]:
    """The path of code for tiles that may be masked, without blocks that mask and without those of full tiles only.

    Where a kernel has the same code for both, this is the path of full tiles.
    """
    shared = {instruction.address for instruction in masked}
    own = {i.address for i in full if i.address in loop.blocks and i.address not in shared}
    of_full_tiles = {address for address in own if count_hmma(loop.blocks[address].instructions)}
    return steady_path(loop, trips, around=set(trips) | masking | of_full_tiles)


def _skipped(loop: Loop, trips: Mapping[int, int], full: list[Instruction]) -> list[Instruction]:
    """The path without any block with HMMA, where there is one."""
    blocks = {address for address, block in loop.blocks.items() if count_hmma(block.instructions)}
    try:
        return steady_path(loop, trips, around=blocks)
    except ValueError:
        return full
