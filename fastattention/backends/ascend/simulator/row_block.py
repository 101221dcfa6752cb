"""The time of a row block on a core: one tile of queries against its tiles of keys, with or without preload.

With preload p the Cube goes on to the scores of tile j + p - 1 before it multiplies the weights of tile j with values.
p = 2 is the paper's schedule: scores 1 while the Vector units work on scores 0, then weights 0 times values while they
work on scores 1, then weights 1 times values while they update O.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fastattention.backends.ascend.simulator.core import WHAT_PIPES_DO, CubeUnit, Setting, VectorUnits
from fastattention.backends.ascend.simulator.events import Buffer, Operation, run
from fastattention.backends.ascend.simulator.workload import IntArray

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

# Tiles of the row blocks that are simulated; the long ones have those with first writes besides. Others are
# interpolated or extrapolated linearly.
SHORT_LENGTHS, LONG_LENGTHS = (1, 2, 4, 8), (12, 20)
FEW_MASKED = 8  # tiles at the end of a row block; of more masked tiles, only their share of all tiles counts


@dataclass(frozen=True)
class RowBlock:
    """What a row block takes, in cycles."""

    cycles: float
    busy: dict[tuple[str, str], float]  # (unit, pipe) -> cycles

    def plus(self, other: RowBlock, factor: float) -> RowBlock:
        """All figures with `factor` times the other's added."""
        busy = {pipe: cycles + factor * other.busy[pipe] for pipe, cycles in self.busy.items()}
        return RowBlock(self.cycles + factor * other.cycles, busy)


def row_block_operations(setting: Setting, num_tiles: int, num_masked: int = 0) -> list[Operation]:
    """The operations of a core for a row block, in the order in which its units get them; the last tiles are masked."""
    operations: list[Operation] = []
    cube, vectors = CubeUnit(setting, operations), VectorUnits(setting, operations)
    ahead = setting.tiling.preload
    # Workspaces in global memory: scores and weights of every tile under way, and two products with values.
    scores, weights, products = Buffer(ahead), Buffer(ahead), Buffer(2)
    weights_ready: dict[int, Operation] = {}
    queries = (cube.load_queries(),)
    for step in range(num_tiles + ahead - 1):
        if step < num_tiles:
            written = cube.scores(step, queries, scores.free())
            ready = cube.signal("FIX", step, written)
            masked = step >= num_tiles - num_masked
            read, stored = vectors.softmax(step, masked, (ready,), weights.free())
            scores.release(*read)
            weights_ready[step] = vectors.signal("MTE3", step, stored)
        if step >= ahead - 1:
            tile = step - ahead + 1
            read, written = cube.products(tile, (weights_ready.pop(tile),), products.free())
            weights.release(*read)
            products.release(*vectors.update(tile, (cube.signal("FIX", tile, written),)))
    vectors.finish(num_tiles - 1)
    return operations


def simulate(setting: Setting, num_tiles: int, num_masked: int = 0) -> RowBlock:
    """All tiles of a row block one by one."""
    operations = row_block_operations(setting, num_tiles, num_masked)
    cycles = run(operations, setting.memory.capacity) + setting.costs.dispatch
    busy = dict.fromkeys(WHAT_PIPES_DO, 0.0)
    for operation in operations:
        busy[operation.unit, operation.pipe] += operation.end - operation.start
    return RowBlock(cycles, busy)


def mixtures(setting: Setting, kinds: IntArray) -> Iterator[tuple[IntArray, list[tuple[RowBlock, FloatArray]]]]:
    """What row blocks of each kind (tiles, masked tiles) in `kinds`, (number of kinds, 2), take.

    Yields some rows of `kinds` at a time, and simulated row blocks with a weight for each of these rows. A kind takes
    their weighted sum. Few short kinds are all simulated. Of many kinds, or long ones, only a few lengths are.
    """
    tiles, masked = kinds.T
    lengths = np.array([*SHORT_LENGTHS, *(tiles + setting.costs.first_writes for tiles in LONG_LENGTHS)])
    short = tiles <= lengths[-1]
    if np.count_nonzero(short) > len(lengths):
        short = np.zeros_like(short)
    for row in np.flatnonzero(short):
        yield np.array([row]), [(_simulated(setting, int(tiles[row]), int(masked[row])), np.ones(1))]
    # All others lie on a line between two neighbouring lengths, or beyond the last two.
    above = np.where(short, 0, np.clip(np.searchsorted(lengths, tiles, "right"), 1, len(lengths) - 1))
    for index in _distinct(above[~short]):
        ends, between = lengths[index - 1 : index + 1].tolist(), above == index
        for number in _distinct(masked[between & (masked <= FEW_MASKED)]):
            rows = np.flatnonzero(between & (masked == number))
            yield rows, _on_a_line(setting, tiles[rows], ends, number)
        rows = np.flatnonzero(between & (masked > FEW_MASKED))
        if len(rows):
            share = masked[rows] / tiles[rows]
            mixture = [(block, weights * share) for block, weights in _on_a_line(setting, tiles[rows], ends, ends[1])]
            plain = _on_a_line(setting, tiles[rows], ends, 0) if np.any(share < 1) else []
            yield rows, mixture + [(block, weights * (1 - share)) for block, weights in plain]


def _distinct(numbers: IntArray) -> list[int]:
    """The distinct values among many small ones; faster than numpy.unique."""
    found: list[int] = np.flatnonzero(np.bincount(numbers)).tolist()
    return found


def _on_a_line(
    setting: Setting, tiles: IntArray, ends: list[int], most_masked: int
) -> list[tuple[RowBlock, FloatArray]]:
    """Weights of row blocks that differ only in their number of tiles: the line through two that are simulated."""
    short, long = ends
    share = (tiles - short) / (long - short)
    return [
        (_simulated(setting, length, min(length, most_masked)), weights)
        for length, weights in ((short, 1.0 - share), (long, share))
        if np.any(weights)
    ]


@functools.lru_cache(maxsize=4096)
def _simulated(setting: Setting, num_tiles: int, num_masked: int) -> RowBlock:
    return simulate(setting, num_tiles, num_masked)


def row_block(setting: Setting, num_tiles: int, num_masked: int = 0) -> RowBlock:
    """What a row block of `num_tiles` takes, by `mixtures` of this one kind."""
    ((_, mixture),) = mixtures(setting, np.array([[num_tiles, num_masked]]))
    (block, weights), *others = mixture
    total = block.plus(block, float(weights[0]) - 1.0)
    for block, weights in others:
        total = total.plus(block, float(weights[0]))
    return total


def row_block_estimate(setting: Setting, num_tiles: int) -> float:
    """Cycles of `num_tiles` tiles, masked or not: a few are simulated, and the rest are extrapolated.

    The estimate is coarse, and cheap enough to compare many tilings.
    """
    few = setting.tiling.preload + 3
    cycles = _simulated(setting, few, 0).cycles
    pace = (cycles - _simulated(setting, few - 2, 0).cycles) / 2
    return cycles + (num_tiles - few) * pace
