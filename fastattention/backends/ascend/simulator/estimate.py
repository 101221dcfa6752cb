"""A coarse estimate of the time of a row block, cheap enough to compare many tilings."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace

from fastattention.backends.ascend.simulator.core import Setting
from fastattention.backends.ascend.simulator.events import run
from fastattention.backends.ascend.simulator.row_block import row_block_operations

STAGES = ("QK", "softmax", "PV", "O update", "flag")  # of every tile


@dataclass(frozen=True)
class TileCycles:
    """Of one tile by itself."""

    whole: float  # with the queries before and the result behind it
    through: float  # from the first product to the last update
    pace: float  # what the busiest pipe or path needs: no schedule is faster


@functools.lru_cache(maxsize=4096)
def tile_cycles(setting: Setting, masked: bool) -> TileCycles:
    """The tile simulated once."""
    operations = row_block_operations(setting, 1, int(masked))
    whole = run(operations, setting.memory.capacity)
    of_tile = [operation for operation in operations if operation.stage in STAGES]
    begin = min(operation.start for operation in of_tile if operation.pipe == "MTE1")
    through = max(operation.end for operation in of_tile) - begin
    cycles: defaultdict[Hashable, float] = defaultdict(float)
    for operation in of_tile:
        cycles[operation.unit, operation.pipe] += operation.amount / operation.rate
        for path in operation.paths:
            cycles[path] += operation.amount / setting.memory.capacity[path]
    return TileCycles(whole, through, max(cycles.values()))


def row_block_estimate(setting: Setting, num_tiles: int, num_masked: int) -> float:
    """Cycles of so many tiles, to the last of which a mask is applied.

    A tile takes what its busiest pipe or path takes; or, with few tiles under way, a share of the way through all its
    stages.
    """
    ahead = min(setting.tiling.preload, num_tiles)
    alone = replace(setting, tiling=replace(setting.tiling, preload=1))  # a tile by itself does not depend on it
    plain, masked = (tile_cycles(alone, with_mask) for with_mask in (False, True))
    pace, masked_pace = (max(tile.pace, tile.through / ahead) for tile in (plain, masked))
    more = (masked_pace - pace) * num_masked
    return setting.costs.dispatch + plain.whole + (num_tiles - 1) * pace + more
