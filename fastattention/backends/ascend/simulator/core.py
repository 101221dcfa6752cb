"""One AI Core: its pipes and buffers, and the four stages of a score tile as operations on them.

A stage is cut as the hardware's buffers demand. Within a stage all pipes overlap, two halves of a buffer in turn. Two
stages of the Cube do not overlap: each uses all of level 0, and a 128 x 256 tile of float32 scores is the whole of L0C.
This is an assumption. Latencies of a busy chip agree with it; those of a lone core (published.FEW_CORES) are shorter,
as if stages did overlap and a busy chip lost as much again where its cores meet in the L2 cache, whose total
rate is not published. Loads into L1 run ahead across stages as far as there are buffers. The two Vector units take half
of the rows each, and their stages overlap wherever pipes and buffers allow it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import MASK_PASSES, SOFTMAX_PASSES, Costs
from fastattention.backends.ascend.simulator.events import Buffer, Event, Pipe
from fastattention.backends.ascend.simulator.memory import Memory
from fastattention.backends.ascend.simulator.tiles import (
    FLOAT32_BYTES,
    Shape,
    Tiling,
    cube_tiles,
    update_rows,
    vector_rows,
)

CUBE, VECTORS = "Cube", ("Vector 0", "Vector 1")
CUBE_PIPES, VECTOR_PIPES = ("MTE2", "MTE1", "M", "FIX"), ("MTE2", "V", "MTE3")


@dataclass(frozen=True)
class Setting:
    """What the time of a row block depends on, beside the number of its tiles. Hashable."""

    chip: Chip
    tiling: Tiling
    shape: Shape
    memory: Memory
    costs: Costs


class VectorUnit:
    """One of the two Vector units of a core. It gets half of the core's rates to memory."""

    def __init__(self, name: str, setting: Setting, events: list[Event]) -> None:
        self._setting = setting
        self.load, self.compute, self.store = (Pipe(name, pipe, events) for pipe in VECTOR_PIPES)
        slots = setting.tiling.num_buffers
        self.scores = Buffer(f"{name} scores", slots)
        self.weights = Buffer(f"{name} weights", slots)
        self.products = Buffer(f"{name} products", 1)
        self.pipes = (self.load, self.compute, self.store)
        self.buffers = (self.scores, self.weights, self.products)

    def softmax(self, tile: int, masked: bool, scores_ready: float, weights_free: float) -> tuple[float, float]:
        """Weights of a tile's rows, slice by slice; when the last scores were read, and the last weights written."""
        chip, tiling, shape, memory, costs = _parts(self._setting)
        read = written = scores_ready
        rows = vector_rows(tiling, chip)
        for first in range(0, rows, tiling.inner_tile_m):
            elements = min(tiling.inner_tile_m, rows - first) * tiling.outer_tile_n
            cycles = elements * shape.score_bytes / (memory.workspace / chip.vectors_per_core)
            if masked:
                cycles += elements / (memory.mask / chip.vectors_per_core)
            read = self.load.run("softmax", tile, cycles, scores_ready, self.scores.available())
            self.scores.take(read - cycles)
            passes = SOFTMAX_PASSES + (MASK_PASSES if masked else 0)
            cycles = elements * (passes / chip.vector_rate + 1 / chip.special_rate) + costs.slice
            done = self.compute.run("softmax", tile, cycles, read, self.weights.available())
            self.weights.take(done - cycles)
            self.scores.release(done)
            cycles = elements * shape.element_bytes / (memory.write / chip.vectors_per_core)
            written = self.store.run("softmax", tile, cycles, done, weights_free)
            self.weights.release(written)
        return read, written

    def update(self, tile: int, products_ready: float) -> tuple[float, float]:
        """O = O * correction + product, in the Vector's buffer; when the last product was read, and all was done."""
        chip, tiling, shape, memory, costs = _parts(self._setting)
        read = done = products_ready
        rows, step = vector_rows(tiling, chip), update_rows(tiling, shape, chip)
        for first in range(0, rows, step):
            elements = min(step, rows - first) * shape.headdim_v * costs.product_share
            cycles = elements * FLOAT32_BYTES / (memory.workspace / chip.vectors_per_core)
            read = self.load.run("O update", tile, cycles, products_ready, self.products.available())
            self.products.take(read - cycles)
            done = self.compute.run("O update", tile, 2 * elements / chip.vector_rate, read)
            self.products.release(done)
        return read, done

    def finish(self, tile: int) -> float:
        """Divide O by the sums of rows and write it."""
        chip, tiling, shape, memory, _ = _parts(self._setting)
        elements = vector_rows(tiling, chip) * shape.headdim_v
        done = self.compute.run("result", tile, elements * (1 / chip.special_rate + 1 / chip.vector_rate))
        cycles = elements * shape.element_bytes / (memory.write / chip.vectors_per_core)
        return self.store.run("result", tile, cycles, done)

    def signal(self, tile: int, after: float) -> float:
        """Tell the Cube that weights are there; when it may read them."""
        half = self._setting.costs.handover / 2
        return self.store.run("flag", tile, half, after) + half


class CubeUnit:
    """The Cube of a core. `free` is when its last stage has left level 0."""

    def __init__(self, setting: Setting, events: list[Event]) -> None:
        self._setting = setting
        self._cut = cube_tiles(setting.tiling, setting.shape, setting.chip)
        self.load, self.feed, self.multiply, self.drain = (Pipe(CUBE, pipe, events) for pipe in CUBE_PIPES)
        slots = setting.tiling.num_buffers
        self.keys = Buffer("L1 keys", slots)
        self.values = Buffer("L1 values", slots)
        self.weights = Buffer("L1 weights", 1)
        self.left, self.right, self.results = (Buffer(name, 2) for name in ("L0A", "L0B", "L0C"))
        self.pipes = (self.load, self.feed, self.multiply, self.drain)
        self.buffers = (self.keys, self.values, self.weights, self.left, self.right, self.results)
        self.free = 0.0

    def load_queries(self) -> float:
        """Queries of the row block into L1; when they are there."""
        tiling, shape = self._setting.tiling, self._setting.shape
        size = tiling.outer_tile_m * shape.headdim * shape.element_bytes
        return self.load.run("queries", 0, size / self._setting.memory.queries)

    def scores(self, tile: int, begin: float) -> tuple[float, float]:
        """Q K^T of a tile into the workspace, not before `begin`; when its first operands were there, and its end."""
        chip, tiling, shape, memory, _ = _parts(self._setting)
        cut, rows, size = self._cut, tiling.outer_tile_m, shape.element_bytes
        started, written = 0.0, begin
        queries_stay = cut.qk_depth == shape.headdim
        for first in range(0, tiling.outer_tile_n, cut.qk_keys):
            cycles = cut.qk_keys * shape.headdim * size / memory.keys
            loaded = self.load.run("QK", tile, cycles, self.keys.available())
            self.keys.take(loaded - cycles)
            started = started or loaded
            done, result_free = loaded, self.results.available()
            for depth in range(0, shape.headdim, cut.qk_depth):
                cycles = cut.qk_keys * cut.qk_depth * size / chip.l1_to_l0b_rate
                if first == 0 or not queries_stay:
                    cycles += rows * cut.qk_depth * size / chip.l1_to_l0a_rate
                done = self._multiply("QK", tile, cycles, (rows, cut.qk_keys, cut.qk_depth), begin, loaded, result_free)
                if depth == 0:
                    self.results.take(done - self._product_cycles(rows, cut.qk_keys, cut.qk_depth))
            self.keys.release(self.feed.free)
            written = self._store("QK", tile, rows * cut.qk_keys * shape.score_bytes, done)
        self.free = written
        return started, written

    def products(self, tile: int, begin: float, weights_ready: float) -> tuple[float, float, float]:
        """P V of a tile into the workspace, not before `begin`.

        Returns when the first weights were there, when all weights had been read, and the stage's end.
        """
        tiling, shape, size = self._setting.tiling, self._setting.shape, self._setting.shape.element_bytes
        cut, rows, chip = self._cut, tiling.outer_tile_m, self._setting.chip
        pieces = [
            (column, key)
            for column in range(0, shape.headdim_v, cut.pv_columns)
            for key in range(0, tiling.outer_tile_n, cut.pv_keys)
        ]
        ahead = [self._load_values(tile) for _ in pieces[: self.values.num_slots]]
        weights = self._load_weights(tile, weights_ready)
        written = result_free = begin
        for number, (_, key) in enumerate(pieces):
            if number >= len(ahead):
                ahead.append(self._load_values(tile))
            ready = max(ahead[number], weights[key])
            if key == 0:
                result_free = self.results.available()
            cycles = rows * cut.pv_keys * size / chip.l1_to_l0a_rate
            cycles += cut.pv_keys * cut.pv_columns * size / chip.l1_to_l0b_rate
            done = self._multiply("PV", tile, cycles, (rows, cut.pv_columns, cut.pv_keys), begin, ready, result_free)
            self.values.release(self.feed.free)
            if key == 0:
                self.results.take(done - self._product_cycles(rows, cut.pv_columns, cut.pv_keys))
            if key + cut.pv_keys >= tiling.outer_tile_n:
                size_out = rows * cut.pv_columns * FLOAT32_BYTES * self._setting.costs.product_share
                written = self._store("PV", tile, size_out, done)
        self.weights.release(self.feed.free)
        self.free = written
        return weights[0], max(weights.values()), written

    def signal(self, tile: int) -> float:
        """Tell the Vector units that a result is there; when they may read it."""
        half = self._setting.costs.handover / 2
        self.free = self.drain.run("flag", tile, half, self.free)
        return self.free + half

    def _load_values(self, tile: int) -> float:
        size = self._cut.pv_keys * self._cut.pv_columns * self._setting.shape.element_bytes
        cycles = size / self._setting.memory.keys
        loaded = self.load.run("PV", tile, cycles, self.values.available())
        self.values.take(loaded - cycles)
        return loaded

    def _load_weights(self, tile: int, ready: float) -> dict[int, float]:
        """When the weights of the keys from a given one on are in L1."""
        tiling, cut = self._setting.tiling, self._cut
        cycles = tiling.outer_tile_m * cut.pv_keys * self._setting.shape.element_bytes / self._setting.memory.workspace
        free = self.weights.available()
        keys = range(0, tiling.outer_tile_n, cut.pv_keys)
        loaded = {key: self.load.run("PV", tile, cycles, ready, free) for key in keys}
        self.weights.take(loaded[0] - cycles)
        return loaded

    def _multiply(self, stage: str, tile: int, feed_cycles: float, sizes: tuple[int, int, int], *after: float) -> float:
        """Operands into L0A and L0B, and their product into L0C."""
        fed = self.feed.run(stage, tile, feed_cycles, *after[:-1], self.left.available(), self.right.available())
        self.left.take(fed - feed_cycles)
        self.right.take(fed - feed_cycles)
        done = self.multiply.run(stage, tile, self._product_cycles(*sizes), fed, after[-1])
        self.left.release(done)
        self.right.release(done)
        return done

    def _product_cycles(self, rows: int, columns: int, depth: int) -> float:
        chip = self._setting.chip
        blocks = math.ceil(rows / chip.cube_m) * math.ceil(columns / chip.cube_n) * math.ceil(depth / chip.cube_k)
        return float(blocks * (chip.float32_slowdown if self._setting.shape.is_float32 else 1))

    def _store(self, stage: str, tile: int, size: float, done: float) -> float:
        written = self.drain.run(stage, tile, size / self._setting.memory.write, done)
        self.results.release(written)
        return written


def _parts(setting: Setting) -> tuple[Chip, Tiling, Shape, Memory, Costs]:
    return setting.chip, setting.tiling, setting.shape, setting.memory, setting.costs
