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

from fastattention.backends.ascend.simulator.core import VECTORS, CubeUnit, Setting, VectorUnit
from fastattention.backends.ascend.simulator.events import Buffer, Event
from fastattention.backends.ascend.simulator.workload import IntArray

FloatArray = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

SIMULATED_TILES = (8, 12)  # beyond, every tile takes what those between these two took on average
# What the time of a core is spent on, seen from its Cube.
REASONS = (
    "QK",
    "PV",
    "flags",
    "waiting for loads",
    "waiting for softmax",
    "waiting for O update",
    "last O update and result",
    "dispatch",
)


@dataclass(frozen=True)
class RowBlock:
    """What a row block takes, in cycles."""

    cycles: float
    busy: dict[tuple[str, str], float]  # (unit, pipe) -> cycles
    spent: dict[str, float]  # reason -> cycles; they add up to `cycles`

    def plus(self, other: RowBlock, factor: float) -> RowBlock:
        """All figures with `factor` times the other's added."""
        return RowBlock(
            self.cycles + factor * other.cycles,
            {pipe: cycles + factor * other.busy[pipe] for pipe, cycles in self.busy.items()},
            {reason: cycles + factor * other.spent[reason] for reason, cycles in self.spent.items()},
        )


@dataclass(frozen=True)
class Run:
    """A row block that was simulated to its end, with all that happened."""

    row_block: RowBlock
    events: list[Event]
    buffers: list[Buffer]


def simulate(setting: Setting, num_tiles: int, num_masked: int = 0) -> Run:
    """All tiles of a row block one by one, the last `num_masked` of them with a mask applied."""
    return _Schedule(setting, num_tiles, num_masked).run()


def mixtures(setting: Setting, kinds: IntArray) -> Iterator[tuple[IntArray, list[tuple[RowBlock, FloatArray]]]]:
    """What row blocks take, of each kind (tiles, masked tiles) in `kinds`, (number of kinds, 2).

    Some rows of `kinds` at a time, and simulated row blocks with a weight for each of these rows: what a kind takes is
    their sum. Long row blocks are continued at the pace that a simulated one has reached.
    """
    first, last = SIMULATED_TILES
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
    first, last = SIMULATED_TILES
    beyond = (tiles - last) / (last - first)
    return [
        (_simulated(setting, last, long_masked), 1 + beyond),
        (_simulated(setting, first, short_masked), -beyond),
    ]


@functools.lru_cache(maxsize=4096)
def _simulated(setting: Setting, num_tiles: int, num_masked: int) -> RowBlock:
    return simulate(setting, num_tiles, num_masked).row_block


def row_block(setting: Setting, num_tiles: int, num_masked: int = 0) -> RowBlock:
    """What so many tiles take: the one kind of `mixtures`."""
    ((_, mixture),) = mixtures(setting, np.array([[num_tiles, num_masked]]))
    (block, weights), *others = mixture
    total = block.plus(block, float(weights[0]) - 1.0)
    for block, weights in others:
        total = total.plus(block, float(weights[0]))
    return total


class _Schedule:
    """The order in which a core's units are given their stages."""

    def __init__(self, setting: Setting, num_tiles: int, num_masked: int) -> None:
        self.setting, self.num_tiles, self.num_masked = setting, num_tiles, num_masked
        self.events: list[Event] = []
        self.cube = CubeUnit(setting, self.events)
        self.vectors = [VectorUnit(name, setting, self.events) for name in VECTORS]
        ahead = setting.tiling.preload
        # Workspaces in global memory: scores and weights of every tile under way, and two products with values.
        self.scores, self.weights = Buffer("scores", ahead), Buffer("weights", ahead)
        self.products = Buffer("products", 2)
        self.spent = dict.fromkeys(REASONS, 0.0)
        self.weights_ready: dict[int, float] = {}

    def run(self) -> Run:
        """Everything, in an order in which nothing is issued before what it waits for."""
        ahead = self.setting.tiling.preload
        queries_ready = self.cube.load_queries()
        for step in range(self.num_tiles + ahead - 1):
            if step < self.num_tiles:
                self._softmax(step, self._scores(step, queries_ready))
            if step >= ahead - 1:
                self._update(step - ahead + 1, self._products(step - ahead + 1))
        end = max(vector.finish(self.num_tiles - 1) for vector in self.vectors)
        dispatch = self.setting.costs.dispatch
        self.spent["last O update and result"] = end - self.cube.free
        self.spent["dispatch"] = dispatch
        pipes = [*self.cube.pipes, *(pipe for vector in self.vectors for pipe in vector.pipes)]
        busy = {(pipe.unit, pipe.name): pipe.busy for pipe in pipes}
        buffers = [*self.cube.buffers, *(buffer for vector in self.vectors for buffer in vector.buffers)]
        return Run(
            RowBlock(end + dispatch, busy, self.spent),
            self.events,
            [*buffers, self.scores, self.weights, self.products],
        )

    def _scores(self, tile: int, queries_ready: float) -> float:
        """When the Vector units may read the scores of a tile."""
        begin = max(self.cube.free, self.scores.available())
        self.spent["waiting for softmax"] += begin - self.cube.free
        self.scores.take(begin)
        loaded, written = self.cube.scores(tile, max(begin, queries_ready))
        operands = max(begin, loaded, queries_ready)
        self.spent["waiting for loads"] += operands - begin
        self.spent["QK"] += written - operands
        return self._signalled(tile)

    def _softmax(self, tile: int, scores_ready: float) -> None:
        free = self.weights.available()
        masked = tile >= self.num_tiles - self.num_masked
        ends = [vector.softmax(tile, masked, scores_ready, free) for vector in self.vectors]
        self.scores.release(max(read for read, _ in ends))
        self.weights.take(max(scores_ready, free))
        signals = [vector.signal(tile, written) for vector, (_, written) in zip(self.vectors, ends, strict=True)]
        self.weights_ready[tile] = max(signals)

    def _products(self, tile: int) -> float:
        """When the Vector units may read the product of a tile with its values."""
        begin = max(self.cube.free, self.products.available())
        self.spent["waiting for O update"] += begin - self.cube.free
        self.products.take(begin)
        ready = self.weights_ready.pop(tile)
        loaded, read, written = self.cube.products(tile, begin, ready)
        self.weights.release(read)
        self.spent["waiting for softmax"] += max(ready - begin, 0.0)
        self.spent["waiting for loads"] += max(loaded - max(begin, ready), 0.0)
        self.spent["PV"] += written - max(begin, loaded)
        return self._signalled(tile)

    def _update(self, tile: int, products_ready: float) -> None:
        self.products.release(max(vector.update(tile, products_ready)[0] for vector in self.vectors))

    def _signalled(self, tile: int) -> float:
        before = self.cube.free
        ready = self.cube.signal(tile)
        self.spent["flags"] += self.cube.free - before
        return ready
