"""From a disassembled kernel and its launch to predicted time, speed and what limits it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .chip import V100, Chip
from .grid import Pace, grid_cycles
from .launch import Launch, Problem, TileKind
from .multiprocessor import Multiprocessor, Outcome
from .operation import NO_CONFLICTS, Conflicts, Operation, Unit, operations
from .paths import Paths, find_paths
from .sass import Function

# Tiles of keys that are simulated: what the longer run takes more is the steady state, the rest overhead.
_FEW, _MANY = 4, 12


@dataclass(frozen=True)
class Prediction:
    """What the model says of one launch. Shares are of cycles in the steady state on a full SM."""

    problem: Problem
    residents: int  # CTAs of an SM
    tile_cycles: float  # of an SM for a tile of keys of one CTA, when full
    tensor_cycles: float  # of these, those that the tensor cores need at their peak rate
    overhead_cycles: float  # of a CTA outside the steady state, when the SM is full
    seconds: float
    tflops: float  # useful ones
    waves: float
    wave_efficiency: float  # time of all tiles at the pace of a full GPU, over predicted time
    issue_share: float
    unit_shares: Mapping[str, float]  # how busy
    lost_shares: Mapping[str, float]  # cycles in which tensor cores idle, by what the next warp waits for

    @property
    def limit(self) -> str:
        """In a few words."""
        tensor = self.unit_shares["tensor"]
        reasons = sorted(self.lost_shares.items(), key=lambda item: -item[1])[:3]
        named = ", ".join(f"{name} {share:.0%}" for name, share in reasons if share >= 0.005)
        return f"tensor cores busy {tensor:.0%}; idle for {named}"


def predict(
    function: Function,
    launch: Launch,
    problem: Problem,
    *,
    trips: Mapping[int, int] | None = None,
    conflicts: Conflicts = NO_CONFLICTS,
    chip: Chip = V100,
) -> Prediction:
    """Predicts a launch.

    trips: how often inner loops run, by header (flow.steady_path).
    Raises ValueError for machine code that the model does not understand, and for CTAs that do not fit an SM.
    """
    return Model(function, launch, trips=trips, conflicts=conflicts, chip=chip).predict(problem)


class Model:
    """One kernel; keeps what its simulations found, since many problems need the same."""

    def __init__(
        self,
        function: Function,
        launch: Launch,
        *,
        trips: Mapping[int, int] | None = None,
        conflicts: Conflicts = NO_CONFLICTS,
        chip: Chip = V100,
    ) -> None:
        self.launch, self.chip = launch, chip
        self.paths: Paths = find_paths(function, trips)
        self._conflicts = conflicts
        self._outcomes: dict[tuple[int, bool], tuple[Outcome, Outcome]] = {}

    def predict(self, problem: Problem) -> Prediction:
        """Predicts one problem."""
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
        less, more = self._simulate(residents, problem.causal)
        return Prediction(
            problem=problem,
            residents=residents,
            tile_cycles=pace.tile / residents,
            tensor_cycles=self.paths.hmma_of_tile * 2 * launch.num_warps / chip.num_schedulers,
            overhead_cycles=pace.overhead,
            seconds=seconds,
            tflops=problem.useful_flops / seconds * 1e-12,
            waves=num_ctas / (residents * chip.num_sms),
            wave_efficiency=ideal / residents / chip.num_sms / (chip.clock_mhz * 1e6) / seconds,
            **_shares(more - less, chip),
        )

    def _pace(self, residents: int, causal: bool) -> Pace:
        less, more = self._simulate(residents, causal)
        tile = (more.cycles - less.cycles) / (_MANY - _FEW)
        return Pace(overhead=max(1.0, less.cycles - _FEW * tile), tile=tile)

    def _simulate(self, residents: int, causal: bool) -> tuple[Outcome, Outcome]:
        """An SM with so many CTAs of few tiles, and of many."""
        key = residents, causal
        if key not in self._outcomes:
            few, many = (self._run(residents, causal, tiles) for tiles in (_FEW, _MANY))
            self._outcomes[key] = few, many
        return self._outcomes[key]

    def _run(self, residents: int, causal: bool, full_tiles: int) -> Outcome:
        """CTAs with so many full tiles and, when causal, those of the diagonal."""
        launch = self.launch
        seqlen = math.lcm(launch.tile_m, launch.tile_n) * 2
        problem = Problem(seqlen, 1, 1, 1, causal)
        m_tile = launch.num_m_tiles(problem) - 1
        before = launch.num_full(problem, m_tile)
        warps = []
        for warp in range(launch.num_warps):
            kinds = list(launch.kinds(problem, m_tile, warp))[before:]
            warps.append(self._path([TileKind.FULL] * full_tiles + kinds))
        return Multiprocessor(self.chip).run([warps] * residents)

    def _path(self, kinds: list[TileKind]) -> list[Operation]:
        tiles = [instruction for kind in kinds for instruction in self.paths.tiles[kind]]
        return operations([*self.paths.prologue, *tiles, *self.paths.epilogue], self.chip, self._conflicts)


def _shares(steady: Outcome, chip: Chip) -> dict[str, Mapping[str, float] | float]:
    total = steady.cycles * chip.num_schedulers
    units = {unit.name.lower(): steady.busy[unit] / total for unit in Unit if steady.busy[unit]}
    units["shared"] = steady.shared_wavefronts / steady.cycles
    return {
        "issue_share": steady.issued / total,
        "unit_shares": {"tensor": 0.0, **units},
        "lost_shares": {name: count / total for name, count in steady.lost.most_common() if count},
    }
