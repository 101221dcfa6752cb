"""Published latencies of Ascend chips that validate the model. No constant was fitted to them.

headdim 128 in float16 without a mask. Microseconds of whole kernels, as published beside the vendor's open attention
kernel, whose tiles are 128 queries by 256 keys. The vendor's fused operator, which torch_npu calls, is shown for
comparison: it has tiles and a schedule of its own. Predictions of whole chips were committed before they were compared,
but the measurements were known when the model's structure was settled: docs/decisions/0068.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, PUBLISHED_STAGES, PUBLISHED_TILE, Costs
from fastattention.backends.ascend.simulator.core import CUBE, CubeUnit, Setting, VectorUnits
from fastattention.backends.ascend.simulator.events import Operation, run
from fastattention.backends.ascend.simulator.memory import cached
from fastattention.backends.ascend.simulator.tiles import HeadShape, Tiling
from fastattention.backends.ascend.simulator.whole_chip import ChipPrediction, predict
from fastattention.backends.ascend.simulator.workload import SimulatedCall


class Measured(NamedTuple):
    """Microseconds on a 910B2."""

    open_kernel: float
    torch_npu: float


MEASURED = {
    1024: Measured(21.0, 58.5),
    2048: Measured(32.5, 70.8),
    4096: Measured(88.9, 118.3),
    8192: Measured(293.0, 353.0),
    16384: Measured(909.0, 1118.0),
    32768: Measured(3263.0, 3646.0),
}
# The accuracy asked of the model, and shapes where it misses it: launches of 17 us differ by as much between hosts.
ALLOWED_ERROR, ALLOWED_AT_1K = 0.12, 0.17
# Few row blocks, one a core: (seqlen_q, seqlen_k) -> microseconds on two hosts with a 910B2, of a version of the open
# kernel that is launched from PyTorch, the average of many runs. Shapes of one or two cores are judged.
FEW_CORES = {
    (128, 1024): (19.200, 16.54),
    (128, 2048): (23.420, 23.98),
    (128, 4096): (38.317, 40.94),
    (128, 8192): (68.778, 72.14),
    (256, 1024): (18.604, 16.77),
    (256, 2048): (23.939, 22.96),
    (256, 4096): (39.838, 40.43),
    (256, 8192): (71.212, 72.39),
    (512, 1024): (18.603, 18.03),
    (512, 2048): (24.787, 25.02),
    (512, 4096): (41.475, 41.21),
    (512, 8192): (74.903, 73.93),
    (1024, 1024): (19.439, 18.70),
    (1024, 2048): (26.221, 26.76),
    (1024, 4096): (43.127, 44.20),
    (1024, 8192): (76.855, 77.65),
    (2048, 1024): (23.424, 23.27),
    (2048, 2048): (36.055, 35.15),
    (2048, 4096): (59.690, 58.43),
    (2048, 8192): (107.780, 100.93),
}
# 12 heads that share one key head, on a die of an A3. There are two kinds of dies with 24 cores, and the source does
# not say which.
A3 = {32768: 37_600.0, 65536: 149_600.0, 131072: 600_000.0}
A3_DIES = ("910_9382", "910_9392")
MEASURED_CHIP = CHIPS["910B2"]
# The measured kernel's tiles; it computes four ahead. Its Vector slices have 32 rows. With these the softmax would take
# longer than published by the rates of the chip, so that 16 are simulated.
MEASURED_TILING = Tiling(PUBLISHED_TILE[0], PUBLISHED_TILE[1], 16, preload=5, multibuffer=True)
# It has a workspace for each row block, eight tiles long, and the program that times whole chips launches it once, with
# memory just allocated. So the first eight tiles of every row block write what the cache does not hold.
MEASURED_COSTS = replace(DEFAULT_COSTS, first_writes=8)
PAPER_TFLOPS = 238.2  # the paper's peak on a 910B, without its SKU, length or tiles
PAPER_GAIN = 10.7  # its best over standard attention, without further details


@dataclass(frozen=True)
class Validated:
    """A length's measurements beside the prediction."""

    seqlen: int
    measured: Measured
    prediction: ChipPrediction

    @property
    def error(self) -> float:
        """Error of the prediction, relative to the open kernel."""
        return self.prediction.seconds * 1e6 / self.measured.open_kernel - 1.0

    @property
    def allowed(self) -> float:
        """The largest error that the model may have."""
        return ALLOWED_AT_1K if self.seqlen == 1024 else ALLOWED_ERROR


@dataclass(frozen=True)
class ValidatedFewCores:
    """The measurements of one shape beside the prediction."""

    seqlen_q: int
    seqlen_k: int
    measured: tuple[float, float]  # microseconds, of both hosts
    prediction: ChipPrediction

    @property
    def cores(self) -> int:
        """Busy cores, with one row block each."""
        return self.prediction.num_row_blocks

    @property
    def errors(self) -> tuple[float, float]:
        """Errors of the prediction, relative to each host."""
        first, second = (self.prediction.seconds * 1e6 / measured - 1.0 for measured in self.measured)
        return first, second


def single_head(seqlen: int) -> SimulatedCall:
    """The problem that was measured."""
    return SimulatedCall(1, seqlen, seqlen, 1, 1, PUBLISHED_TILE[2], PUBLISHED_TILE[2], torch.float16)


def of_a3(seqlen: int) -> SimulatedCall:
    """The problem that was measured on an A3."""
    return replace(single_head(seqlen), nheads=12)


def validate(tiling: Tiling = MEASURED_TILING, costs: Costs = MEASURED_COSTS) -> list[Validated]:
    """The model on every length that was measured."""
    return [
        Validated(seqlen, measured, predict(single_head(seqlen), tiling, MEASURED_CHIP, costs))
        for seqlen, measured in MEASURED.items()
    ]


def validate_few_cores(tiling: Tiling = MEASURED_TILING) -> list[ValidatedFewCores]:
    """The model for few busy cores, whose workspaces are in the cache: the kernel was launched many times."""
    return [
        ValidatedFewCores(
            seqlen_q,
            seqlen_k,
            measured,
            predict(replace(single_head(seqlen_k), seqlen_q=seqlen_q), tiling, MEASURED_CHIP),
        )
        for (seqlen_q, seqlen_k), measured in FEW_CORES.items()
    ]


def simulated_stages(chip: Chip = MEASURED_CHIP) -> dict[str, float]:
    """Cycles of each stage of the published tile by itself, its operands being at hand."""
    shape = HeadShape(PUBLISHED_TILE[2], PUBLISHED_TILE[2], 2)
    setting = Setting(chip, MEASURED_TILING, shape, cached(chip, DEFAULT_COSTS), DEFAULT_COSTS)
    stages: dict[str, Callable[[CubeUnit, VectorUnits], object]] = {
        "QK": lambda cube, _: cube.scores(0, (), ()),
        "softmax": lambda _, vectors: vectors.softmax(0, False, (), ()),
        "PV": lambda cube, _: cube.products(0, (), ()),
        "O update": lambda _, vectors: vectors.update(0, ()),
    }
    return {stage: _stage_cycles(setting, do) for stage, do in stages.items()}


def _stage_cycles(setting: Setting, do: Callable[[CubeUnit, VectorUnits], object]) -> float:
    """Cycles of the operations of a stage, apart from loads into L1, which were done before."""
    operations: list[Operation] = []
    do(CubeUnit(setting, operations), VectorUnits(setting, operations))
    for operation in operations:
        if (operation.unit, operation.pipe) == (CUBE, "MTE2"):
            operation.amount = 0.0
    return run(operations, setting.memory.capacity)


def residuals() -> dict[str, float]:
    """Errors of the simulated stages, relative to the published ones."""
    return {stage: cycles / PUBLISHED_STAGES[stage] - 1.0 for stage, cycles in simulated_stages().items()}
