"""Predicts time, speed and limits of a disassembled kernel and its launch.

An SM with as many CTAs as fit is simulated for a few tiles of keys, then for more: the difference is the time of a
tile, the rest is overhead. The same is done for SMs that hold fewer, as at the end of a grid. grid.py then counts
cycles until the last CTA ends. report.LEFT_OUT says what is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .chip import V100, Chip
from .counts import CYCLES_PER_HMMA
from .grid import Pace, grid_cycles
from .launch import Launch, Problem, TileKind
from .multiprocessor import Multiprocessor, Outcome
from .operation import Operation, Unit, operations
from .paths import Paths

TILES = (2, 8)  # twice as many change predictions by 2% at most


@dataclass(frozen=True)
class Prediction:
    """The model's figures for one launch. Shares are of cycles in the steady state on a full SM."""

    problem: Problem
    residents: int  # CTAs of an SM
    tile_cycles: float  # of an SM for a tile of keys of one CTA, when full
    tensor_cycles: float  # those of them that the tensor cores need at their peak rate
    overhead_cycles: float  # of a CTA outside the steady state, when the SM is full
    seconds: float
    tflops: float  # useful TFLOPS
    waves: float
    wave_efficiency: float  # time of all tiles at the pace of a full GPU, over predicted time
    issue_share: float
    unit_shares: Mapping[str, float]  # how busy
    lost_shares: Mapping[str, float]  # cycles in which tensor cores idle, by what the next warp waits for

    @property
    def limit(self) -> str:
        """The limiting resource, in a few words."""
        tensor = self.unit_shares["tensor"]
        reasons = sorted(self.lost_shares.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {share:.0%}" for name, share in reasons if share >= 0.005)
        return f"tensor cores busy {tensor:.0%}; idle for {named}"


class Model:
    """One kernel on one chip. It caches results of simulations, since many problems need the same.

    tiles: numbers of tiles of keys that are simulated, for the overhead of a CTA and for the pace of a tile.
    """

    def __init__(self, paths: Paths, launch: Launch, chip: Chip = V100, tiles: tuple[int, int] = TILES) -> None:
        self.paths, self.launch, self.chip = paths, launch, chip
        self._few, self._many = tiles
        self._outcomes: dict[tuple[int, int, bool], Outcome] = {}

    def predict(self, problem: Problem) -> Prediction:
        """Predicts one problem.

        Raises ValueError for machine code that the model does not know, and for CTAs that do not fit an SM.
        """
        launch, chip = self.launch, self.chip
        num_ctas, most = launch.num_ctas(problem), launch.residents(chip)
        residents = min(most, -(-num_ctas // chip.num_sms))
        paces = [self._pace(number, problem.causal) for number in range(1, residents + 1)]
        full_tiles = [launch.num_full(problem, tile) for tile in range(launch.num_m_tiles(problem))]
        cycles = grid_cycles((full_tiles[tile] for tile in launch.order(problem)), chip.num_sms, paces)
        seconds = (cycles + chip.launch_cycles) / (chip.clock_mhz * 1e6)
        seconds = max(seconds, problem.bytes_moved / (chip.dram_gbps * 1e9))
        pace = paces[-1]
        ideal = sum(full_tiles[tile] * pace.tile + pace.overhead for tile in launch.order(problem))
        steady = self._simulate(residents, self._many, False) - self._simulate(residents, self._few, False)
        slots = steady.cycles * chip.num_schedulers
        units = {unit.name.lower(): busy / slots for unit, busy in steady.busy.items() if busy or unit is Unit.TENSOR}
        units["shared"] = steady.shared_wavefronts / steady.cycles
        return Prediction(
            problem=problem,
            residents=residents,
            tile_cycles=pace.tile / residents,
            tensor_cycles=self.paths.hmma_of_tile * CYCLES_PER_HMMA * launch.num_warps / chip.num_schedulers,
            overhead_cycles=pace.overhead,
            seconds=seconds,
            tflops=problem.useful_flops / seconds * 1e-12,
            waves=num_ctas / (residents * chip.num_sms),
            wave_efficiency=ideal / residents / chip.num_sms / (chip.clock_mhz * 1e6) / seconds,
            issue_share=steady.issued / slots,
            unit_shares=units,
            lost_shares={name: count / slots for name, count in steady.lost.most_common() if count},
        )

    def _pace(self, residents: int, causal: bool) -> Pace:
        """The pace of a tile: the difference of two simulations. The rest of the shorter one is overhead."""
        less, more = self._simulate(residents, self._few, False), self._simulate(residents, self._many, False)
        tile = (more.cycles - less.cycles) / (self._many - self._few)
        return Pace(max(1.0, self._simulate(residents, self._few, causal).cycles - self._few * tile), tile)

    def _simulate(self, residents: int, full_tiles: int, causal: bool) -> Outcome:
        """Simulates an SM with CTAs of `full_tiles` full tiles and, when causal, those of the diagonal besides."""
        key = residents, full_tiles, causal
        if key not in self._outcomes:
            warps = [
                self._path([TileKind.FULL] * full_tiles + (self._diagonal(warp) if causal else []))
                for warp in range(self.launch.num_warps)
            ]
            self._outcomes[key] = Multiprocessor(self.chip).run([warps] * residents)
        return self._outcomes[key]

    def _diagonal(self, warp: int) -> list[TileKind]:
        """The kinds of the last tiles of keys of a warp in a causal problem, from the first that some warp masks."""
        launch = self.launch
        problem = Problem(math.lcm(launch.tile_m, launch.tile_n) * 2, 1, 1, 1, causal=True)
        m_tile = launch.num_m_tiles(problem) - 1
        return list(launch.kinds(problem, m_tile, warp))[launch.num_full(problem, m_tile) :]

    def _path(self, kinds: list[TileKind]) -> list[Operation]:
        tiles = [instruction for kind in kinds for instruction in self.paths.tiles[kind]]
        return operations([*self.paths.prologue, *tiles, *self.paths.epilogue], self.chip)
