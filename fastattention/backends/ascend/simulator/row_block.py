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

from fastattention.backends.ascend.simulator.core import CUBE, CUBE_PIPES, VECTOR, VECTOR_PIPES, CubeUnit, Setting, VectorUnits
from fastattention.backends.ascend.simulator.events import Buffer, Operation, run
from fastattention.backends.ascend.simulator.workload import IntArray

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

SIMULATED_TILES = (8, 12)  # with the first writes before; beyond, every tile takes what those between took on average
PIPES = (*((CUBE, pipe) for pipe in CUBE_PIPES), *((VECTOR, pipe) for pipe in VECTOR_PIPES))


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
    """What a core does for a row block, in the order in which its units are told to; the last tiles are masked."""
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
    busy = dict.fromkeys(PIPES, 0.0)
    for operation in operations:
        busy[operation.unit, operation.pipe] += operation.end - operation.start
    return RowBlock(cycles, busy)


def mixtures(setting: Setting, kinds: IntArray) -> Iterator[tuple[IntArray, list[tuple[RowBlock, FloatArray]]]]:
    """What row blocks take, of each kind (tiles, masked tiles) in `kinds`, (number of kinds, 2).

    Some rows of `kinds` at a time, and simulated row blocks with a weight for each of these rows: what a kind takes is
    their sum. Long row blocks are continued at the pace that a simulated one has reached.
    """
    first, last = (tiles + setting.costs.first_writes for tiles in SIMULATED_TILES)
    tiles, masked = kinds.T
    for row in np.flatnonzero(tiles <= last):
        yield np.array([row]), [(_simulated(setting, int(tiles[row]), int(masked[row])), np.ones(1))]
    whole, partly = (tiles > last) & (masked == tiles), (tiles > last) & (masked < tiles)
    for number in np.unique(masked[partly & (masked <= first)]).tolist():
        rows = np.flatnonzero(partly & (masked == number))
        yield rows, _continued(setting, tiles[rows], number, number)
    for rows, plain in ((np.flatnonzero(whole), False), (np.flatnonzero(partly & (masked > first)), True)):
        if len(rows) == 0:
            continue
        share = masked[rows] / tiles[rows]
        mixture = [(block, weights * share) for block, weights in _continued(setting, tiles[rows], first, last)]
        if plain:
            mixture += [(block, weights * (1 - share)) for block, weights in _continued(setting, tiles[rows], 0, 0)]
        yield rows, mixture


def _continued(
    setting: Setting, tiles: IntArray, short_masked: int, long_masked: int
) -> list[tuple[RowBlock, FloatArray]]:
    """Likewise, of row blocks that are all alike but in their number of tiles: the line through both simulated ones."""
    first, last = (tiles + setting.costs.first_writes for tiles in SIMULATED_TILES)
    beyond = (tiles - last) / (last - first)
    return [
        (_simulated(setting, last, long_masked), 1 + beyond),
        (_simulated(setting, first, short_masked), -beyond),
    ]


@functools.lru_cache(maxsize=4096)
def _simulated(setting: Setting, num_tiles: int, num_masked: int) -> RowBlock:
    return simulate(setting, num_tiles, num_masked)


def row_block(setting: Setting, num_tiles: int, num_masked: int = 0) -> RowBlock:
    """What so many tiles take: the one kind of `mixtures`."""
    ((_, mixture),) = mixtures(setting, np.array([[num_tiles, num_masked]]))
    (block, weights), *others = mixture
    total = block.plus(block, float(weights[0]) - 1.0)
    for block, weights in others:
        total = total.plus(block, float(weights[0]))
    return total
