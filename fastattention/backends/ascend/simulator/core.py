"""The operations of one AI Core: the four stages of a score tile, cut as the hardware's buffers demand.

A stage waits for its inputs and for the buffers that it fills, never for the stage before it. So the stages of the Cube
overlap as far as the two halves of L0A, L0B and L0C allow, and those of the Vector units as far as their buffers do.
The two Vector units take half of the rows each and work in step, so one is simulated for both. Cube and Vector
units share the core's two ports to the L2 cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import MASK_PASSES, SOFTMAX_PASSES, Costs
from fastattention.backends.ascend.simulator.events import Buffer, Operation, Path
from fastattention.backends.ascend.simulator.memory import Memory
from fastattention.backends.ascend.simulator.tiles import (
    FLOAT32_BYTES,
    HeadShape,
    Tiling,
    cube_tiles,
    update_rows,
    vector_rows,
)

CUBE, VECTOR = "Cube", "Vector"
WHAT_PIPES_DO = {
    (CUBE, "MTE2"): "memory to L1",
    (CUBE, "MTE1"): "L1 to L0",
    (CUBE, "M"): "products",
    (CUBE, "FIX"): "L0C to memory",
    (VECTOR, "MTE2"): "memory to UB",
    (VECTOR, "V"): "vectors",
    (VECTOR, "MTE3"): "UB to memory",
}
READ, WRITE = (Path.IN, Path.L2), (Path.OUT, Path.L2)

After = tuple[Operation, ...]


@dataclass(frozen=True)
class Setting:
    """Everything that the time of a row block depends on, besides the number of its tiles. Hashable."""

    chip: Chip
    tiling: Tiling
    shape: HeadShape
    memory: Memory
    costs: Costs


class Unit:
    """What both kinds of unit share: a list of operations that grows."""

    def __init__(self, name: str, setting: Setting, operations: list[Operation]) -> None:
        self.name, self.setting, self.operations = name, setting, operations

    def work(self, pipe: str, stage: str, tile: int, cycles: float, after: After) -> Operation:
        """Something that takes cycles."""
        return self._add(Operation(self.name, pipe, stage, tile, cycles, after=after))

    def read(self, stage: str, tile: int, size: float, after: After, rate: float | None = None) -> Operation:
        """A transfer into the unit. rate: that of the source, if it is slower than the port."""
        limit = self.setting.memory.read if rate is None else rate
        return self._add(Operation(self.name, "MTE2", stage, tile, size, limit, READ, after))

    def write(self, pipe: str, stage: str, tile: int, size: float, after: After) -> Operation:
        """A transfer out of the unit. The first tiles of a row block may find no workspace in the cache."""
        new = tile < self.setting.costs.first_writes and stage != "result"
        paths = (*WRITE, Path.MEMORY) if new else WRITE
        return self._add(Operation(self.name, pipe, stage, tile, size, self.setting.memory.write, paths, after))

    def signal(self, pipe: str, tile: int, after: After) -> Operation:
        """Tell the other unit that a result is there: half on this side, half on the side that waits."""
        half = self.setting.costs.handover / 2
        return self._add(Operation(self.name, pipe, "flag", tile, half, after=after, latency=half))

    def _add(self, operation: Operation) -> Operation:
        self.operations.append(operation)
        return operation


class VectorUnits(Unit):
    """Both Vector units of a core. Transfers are counted for both, arithmetic for one."""

    def __init__(self, setting: Setting, operations: list[Operation]) -> None:
        super().__init__(VECTOR, setting, operations)
        slots = setting.tiling.num_buffers
        self._scores, self._weights, self._products = Buffer(slots), Buffer(slots), Buffer(1)

    def softmax(self, tile: int, masked: bool, scores_ready: After, weights_free: After) -> tuple[After, After]:
        """Weights of a tile's rows, slice by slice: the reads of scores and the writes of weights."""
        chip, tiling, shape, costs = self.setting.chip, self.setting.tiling, self.setting.shape, self.setting.costs
        reads, writes = list[Operation](), list[Operation]()
        rows, units = vector_rows(tiling, chip), chip.vectors_per_core
        for first in range(0, rows, tiling.inner_tile_m):
            elements = min(tiling.inner_tile_m, rows - first) * tiling.outer_tile_n
            free = self._scores.free()
            loaded = [self.read("softmax", tile, units * elements * shape.score_bytes, (*scores_ready, *free))]
            if masked:
                loaded.append(self.read("softmax", tile, units * elements, free, self.setting.memory.mask))
            passes = SOFTMAX_PASSES + (MASK_PASSES if masked else 0)
            cycles = elements * (passes / chip.vector_rate + 1 / chip.special_rate) + costs.slice
            done = self.work("V", "softmax", tile, cycles, (*loaded, *self._weights.free()))
            self._scores.release(done)
            size = units * elements * shape.element_bytes
            writes.append(self.write("MTE3", "softmax", tile, size, (done, *weights_free)))
            self._weights.release(writes[-1])
            reads += loaded
        return tuple(reads), tuple(writes)

    def update(self, tile: int, products_ready: After) -> After:
        """O = O * correction + product, in the Vector's buffer: the reads of the product."""
        chip, tiling, shape = self.setting.chip, self.setting.tiling, self.setting.shape
        reads = list[Operation]()
        rows, step = vector_rows(tiling, chip), update_rows(tiling, shape, chip)
        for first in range(0, rows, step):
            elements = min(step, rows - first) * shape.headdim_v * self.setting.costs.product_share
            size = chip.vectors_per_core * elements * FLOAT32_BYTES
            reads.append(self.read("O update", tile, size, (*products_ready, *self._products.free())))
            self._products.release(self.work("V", "O update", tile, 2 * elements / chip.vector_rate, (reads[-1],)))
        return tuple(reads)

    def finish(self, tile: int) -> None:
        """Divide O by the sums of rows and write it."""
        chip, shape = self.setting.chip, self.setting.shape
        elements = vector_rows(self.setting.tiling, chip) * shape.headdim_v
        done = self.work("V", "result", tile, elements * (1 / chip.special_rate + 1 / chip.vector_rate), ())
        self.write("MTE3", "result", tile, chip.vectors_per_core * elements * shape.element_bytes, (done,))


class CubeUnit(Unit):
    """The Cube of a core."""

    def __init__(self, setting: Setting, operations: list[Operation]) -> None:
        super().__init__(CUBE, setting, operations)
        self._cut = cube_tiles(setting.tiling, setting.shape, setting.chip)
        slots = setting.tiling.num_buffers
        self._keys, self._values, self._weights = Buffer(slots), Buffer(slots), Buffer(1)  # in L1
        self._left, self._right, self._results = Buffer(2), Buffer(2), Buffer(2)  # halves of L0A, L0B and L0C

    def load_queries(self) -> Operation:
        """Queries of the row block into L1."""
        tiling, shape = self.setting.tiling, self.setting.shape
        size = tiling.outer_tile_m * shape.headdim * shape.element_bytes
        return self.read("queries", 0, size, (), self.setting.memory.queries)

    def scores(self, tile: int, queries: After, workspace_free: After) -> After:
        """Q K^T of a tile into the workspace: the writes."""
        cut, shape, rows = self._cut, self.setting.shape, self.setting.tiling.outer_tile_m
        chip, writes = self.setting.chip, list[Operation]()
        queries_stay = cut.qk_depth == shape.headdim
        for first in range(0, self.setting.tiling.outer_tile_n, cut.qk_keys):
            size = cut.qk_keys * shape.headdim * shape.element_bytes
            loaded = self.read("QK", tile, size, self._keys.free(), self.setting.memory.keys)
            done: Operation | None = None
            for depth in range(0, shape.headdim, cut.qk_depth):
                cycles = cut.qk_keys * cut.qk_depth * shape.element_bytes / chip.l1_to_l0b_rate
                if first == 0 or not queries_stay:
                    cycles += rows * cut.qk_depth * shape.element_bytes / chip.l1_to_l0a_rate
                into = self._results.free() if depth == 0 else ()
                fed, done = self._multiply(
                    "QK", tile, cycles, (rows, cut.qk_keys, cut.qk_depth), (*queries, loaded), into
                )
            self._keys.release(fed)
            assert done is not None
            size = rows * cut.qk_keys * shape.score_bytes
            writes.append(self.write("FIX", "QK", tile, size, (done, *workspace_free)))
            self._results.release(writes[-1])
        return tuple(writes)

    def products(self, tile: int, weights_ready: After, workspace_free: After) -> tuple[After, After]:
        """P V of a tile into the workspace: the reads of weights, and the writes."""
        cut, shape, tiling, rows = self._cut, self.setting.shape, self.setting.tiling, self.setting.tiling.outer_tile_m
        chip, size = self.setting.chip, self.setting.shape.element_bytes
        keys = range(0, tiling.outer_tile_n, cut.pv_keys)
        pieces = [(column, key) for column in range(0, shape.headdim_v, cut.pv_columns) for key in keys]
        ahead = [self._load_values(tile) for _ in pieces[: tiling.num_buffers]]
        after = (*weights_ready, *self._weights.free())
        weights = {key: self.read("PV", tile, rows * cut.pv_keys * size, after) for key in keys}
        writes, into = list[Operation](), self._results.free()
        for number, (column, key) in enumerate(pieces):
            if number >= len(ahead):
                ahead.append(self._load_values(tile))
            if key == 0 and column:
                into = self._results.free()
            cycles = rows * cut.pv_keys * size / chip.l1_to_l0a_rate
            cycles += cut.pv_keys * cut.pv_columns * size / chip.l1_to_l0b_rate
            operands = (ahead[number], weights[key])
            fed, done = self._multiply("PV", tile, cycles, (rows, cut.pv_columns, cut.pv_keys), operands, into)
            self._values.release(fed)
            if key + cut.pv_keys >= tiling.outer_tile_n:
                out = rows * cut.pv_columns * FLOAT32_BYTES * self.setting.costs.product_share
                writes.append(self.write("FIX", "PV", tile, out, (done, *workspace_free)))
                self._results.release(writes[-1])
        self._weights.release(fed)
        return tuple(weights.values()), tuple(writes)

    def _load_values(self, tile: int) -> Operation:
        size = self._cut.pv_keys * self._cut.pv_columns * self.setting.shape.element_bytes
        return self.read("PV", tile, size, self._values.free(), self.setting.memory.keys)

    def _multiply(
        self, stage: str, tile: int, feed_cycles: float, sizes: tuple[int, int, int], operands: After, into: After
    ) -> tuple[Operation, Operation]:
        """Operands into halves of L0A and L0B, and their product into a half of L0C."""
        fed = self.work("MTE1", stage, tile, feed_cycles, (*operands, *self._left.free(), *self._right.free()))
        chip = self.setting.chip
        rows, columns, depth = sizes
        blocks = math.ceil(rows / chip.cube_m) * math.ceil(columns / chip.cube_n) * math.ceil(depth / chip.cube_k)
        cycles = float(blocks * (chip.float32_slowdown if self.setting.shape.is_float32 else 1))
        done = self.work("M", stage, tile, cycles, (fed, *into))
        self._left.release(done)
        self._right.release(done)
        return fed, done
