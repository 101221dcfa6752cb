"""The time of a call on the whole chip: row blocks are dealt out to the cores of a persistent grid.

Busy cores work in step and share the L2 cache and memory equally. When a core has no row block left,
the others get its share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fastattention.backends.ascend.chips import Chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, Costs
from fastattention.backends.ascend.simulator.core import Setting
from fastattention.backends.ascend.simulator.events import Operation, run
from fastattention.backends.ascend.simulator.memory import cached, rate
from fastattention.backends.ascend.simulator.row_block import (
    FloatArray,
    RowBlock,
    mixtures,
    row_block,
    row_block_estimate,
    row_block_operations,
)
from fastattention.backends.ascend.simulator.tiles import FLOAT32_BYTES, Tiling
from fastattention.backends.ascend.simulator.workload import IntArray, MaskMode, SimulatedCall, decode_splits

SHORT_STEP = 0.01  # share of the whole time; changes in what a core gets are not simulated for shorter steps


@dataclass(frozen=True)
class ChipPrediction:
    """The model's prediction for a call. No figure has been measured."""

    workload: SimulatedCall
    tiling: Tiling
    chip: Chip
    seconds: float
    busy: dict[tuple[str, str], float]  # (unit, pipe) -> share of the call's time, average of all cores
    idle: float  # share of the cores' time in which they have no row block
    num_row_blocks: int
    num_splits: int

    @property
    def tflops(self) -> float:
        """Useful arithmetic: hidden scores do not count."""
        return self.workload.useful_flops / self.seconds / 1e12

    @property
    def fraction_of_peak(self) -> float:
        """Share of the Cubes' peak, of which float32 has a quarter."""
        slowdown = self.chip.float32_slowdown if self.workload.shape.is_float32 else 1
        return self.tflops / (self.chip.peak_tflops / slowdown)


@dataclass(frozen=True)
class _Items:
    """Work items of a call, in the order in which the programs of a persistent grid take them: head by head."""

    kinds: IntArray  # (number of kinds, 2): tiles, and how many of them are masked
    kind_of: IntArray  # (items of a head,)
    num_heads: int
    num_splits: int
    sharers: int  # cores that read the same keys at the same time

    @property
    def count(self) -> int:
        """Work items of all heads."""
        return len(self.kind_of) * self.num_heads

    @property
    def counts(self) -> IntArray:
        """Items of each kind, in one head."""
        return np.bincount(self.kind_of, minlength=len(self.kinds))

    def of_cores(self, cycles: FloatArray, num_cores: int) -> FloatArray:
        """Cycles of each core, from the cycles of each kind."""
        each = cycles[self.kind_of]
        of_head = np.array([each[core::num_cores].sum() for core in range(num_cores)])  # begins at core 0
        # The next head begins at the core after the last one, until a head begins at the first core again.
        step = len(each) % num_cores
        period = num_cores // math.gcd(step, num_cores)
        rounds, rest = divmod(self.num_heads, period)
        total = np.zeros(num_cores)
        for head in range(period):
            total += (rounds + (head < rest)) * np.roll(of_head, head * step)
        return total


class _Parts(NamedTuple):
    """What the items of one head take, by kind and in all."""

    cycles: FloatArray  # (number of kinds,)
    total: RowBlock


def predict(workload: SimulatedCall, tiling: Tiling, chip: Chip, costs: Costs = DEFAULT_COSTS) -> ChipPrediction:
    """Simulate a call."""
    items = _items(workload, tiling, chip)
    busy_cores = min(items.count, chip.num_cores)
    setting = _setting(workload, tiling, chip, costs, items, busy_cores)
    parts = _parts(setting, items)
    longest = tuple(items.kinds[int(np.argmax(parts.cycles))].tolist())
    among_all = row_block(setting, *longest).cycles

    def slowdown(cores: int) -> float:
        """Slowdown of a row block by `cores` busy cores, relative to all of them."""
        return row_block(_setting(workload, tiling, chip, costs, items, cores), *longest).cycles / among_all

    of_cores = items.of_cores(parts.cycles, chip.num_cores)
    total = _launch_cycles(items, costs) + _until_done(of_cores, slowdown)
    share = items.num_heads / chip.num_cores / total
    busy = {pipe: share * cycles for pipe, cycles in parts.total.busy.items()}
    idle = 1.0 - share * parts.total.cycles
    return ChipPrediction(workload, tiling, chip, total / chip.clock_hz, busy, idle, items.count, items.num_splits)


def _until_done(of_cores: FloatArray, slowdown: Callable[[int], float]) -> float:
    """Cycles until the last core is done. Cores get faster as others finish.

    of_cores: cycles of each core while all are busy. slowdown: the slowdown of busy cores, by their number.
    """
    ends = np.sort(of_cores[of_cores > 0])
    total = 0.0
    for done, step in enumerate(np.diff(ends, prepend=0.0).tolist()):
        total += step * (slowdown(len(ends) - done) if step > SHORT_STEP * ends[-1] else 1.0)
    return total


def _parts(setting: Setting, items: _Items) -> _Parts:
    """What each kind takes: a weighted sum of a few simulated row blocks, however long the call is."""
    cycles, counts = np.zeros(len(items.kinds)), items.counts
    total: RowBlock | None = None
    for chosen, mixture in mixtures(setting, items.kinds):
        for simulated, weights in mixture:
            cycles[chosen] += weights * simulated.cycles
            weight = float(weights @ counts[chosen])
            total = simulated.plus(simulated, weight - 1.0) if total is None else total.plus(simulated, weight)
    assert total is not None  # there is an item
    return _Parts(cycles, total)


def estimate_cycles(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> float:
    """Cycles as `predict` gives them, but estimated from a row block while all cores are busy."""
    items = _items(workload, tiling, chip)
    setting = _setting(workload, tiling, chip, DEFAULT_COSTS, items, min(items.count, chip.num_cores))
    cycles = np.array([row_block_estimate(setting, num_tiles) for num_tiles in items.kinds[:, 0].tolist()])
    return _launch_cycles(items, DEFAULT_COSTS) + float(np.max(items.of_cores(cycles, chip.num_cores)))


def simulated_operations(workload: SimulatedCall, tiling: Tiling, chip: Chip, num_tiles: int) -> list[Operation]:
    """All operations of the first `num_tiles` tiles of a row block without a mask, as `predict` simulates them."""
    items = _items(workload, tiling, chip)
    setting = _setting(workload, tiling, chip, DEFAULT_COSTS, items, min(items.count, chip.num_cores))
    operations = row_block_operations(setting, num_tiles)
    run(operations, setting.memory.capacity)
    return operations


def _items(workload: SimulatedCall, tiling: Tiling, chip: Chip) -> _Items:
    return _items_of(workload, tiling.outer_tile_m, tiling.outer_tile_n, chip.num_cores)


@functools.lru_cache(maxsize=4)  # tilings that are compared in a row mostly share these arguments
def _items_of(workload: SimulatedCall, outer_tile_m: int, outer_tile_n: int, num_cores: int) -> _Items:
    blocks = workload.row_blocks(outer_tile_m, outer_tile_n)
    most = int(blocks[:, 0].max())
    num_splits = decode_splits(len(blocks) * workload.num_heads, most, num_cores) if workload.is_decode else 1
    # The last rows of a head come first, and the splits of a row block follow one another.
    tiles = np.repeat(-(-blocks[::-1, 0] // num_splits), num_splits)
    masked = np.minimum(np.repeat(blocks[::-1, 1], num_splits), tiles)
    most_tiles = int(tiles.max()) + 1
    # A pair becomes one number, which is faster to sort.
    codes, kind_of = np.unique(tiles * most_tiles + masked, return_inverse=True)
    kinds = np.stack(np.divmod(codes, most_tiles), axis=1)
    sharers = 1 if workload.is_decode else len(blocks) * workload.group_size
    sharers = min(sharers, len(kind_of) * workload.num_heads, num_cores)
    return _Items(kinds, kind_of, workload.num_heads, num_splits, sharers)


def _launch_cycles(items: _Items, costs: Costs) -> float:
    return costs.launch * (2 if items.num_splits > 1 else 1)  # the second kernel merges the splits


def _setting(
    workload: SimulatedCall, tiling: Tiling, chip: Chip, costs: Costs, items: _Items, busy_cores: int
) -> Setting:
    """A core's view of a call. It reads from memory, unless the whole call fits the cache.

    A decode reads keys and values from memory whatever their size: other layers have used the cache since they were
    written.
    """
    memory = cached(chip, costs, busy_cores)
    workspace = min(items.count, chip.num_cores) * tiling.preload * _workspace_bytes(workload, tiling)
    fits = workload.tensor_bytes + workload.mask_bytes + workspace <= chip.l2_bytes
    if not fits or workload.is_decode:
        memory = replace(memory, keys=rate(chip, busy_cores, items.sharers), queries=rate(chip, busy_cores, 1))
    if not fits and workload.mask_mode is not MaskMode.TILING:
        memory = replace(memory, mask=rate(chip, busy_cores, 1))
    return Setting(chip, tiling, workload.shape, memory, costs)


def _workspace_bytes(workload: SimulatedCall, tiling: Tiling) -> int:
    """Bytes of a score tile that the units of a core exchange: scores, weights and product."""
    shape = workload.shape
    row = tiling.outer_tile_n * (shape.score_bytes + shape.element_bytes) + shape.headdim_v * FLOAT32_BYTES
    return tiling.outer_tile_m * row
