"""Published latencies of Ascend chips that validate the model. No constant was fitted to them.

They were known when the model's structure was settled, which calibration.py says more about.

headdim 128 in float16 without a mask. Microseconds of whole kernels, as published beside the vendor's open attention
kernel, whose tiles are 128 queries by 256 keys. The vendor's fused operator behind torch_npu is shown for comparison:
it has tiles and a schedule of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fastattention.backends.ascend.chips import CHIPS, Chip
from fastattention.backends.ascend.simulator.calibration import DEFAULT_COSTS, PUBLISHED_STAGES, PUBLISHED_TILE
from fastattention.backends.ascend.simulator.core import CubeUnit, Setting, VectorUnit
from fastattention.backends.ascend.simulator.memory import cached
from fastattention.backends.ascend.simulator.tiles import Shape, Tiling
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
ALLOWED_ERROR = {1024: 0.30, 2048: 0.30, 4096: 0.15, 8192: 0.15, 16384: 0.15, 32768: 0.15}
# Few row blocks, so that one or two cores work: (seqlen_q, seqlen_k) -> microseconds on a 910B2, of a version of the
# open kernel that is launched from PyTorch. Shown, not judged: a core whose neighbours idle is faster than modelled.
FEW_CORES = {
    (128, 1024): 19.2,
    (128, 2048): 23.42,
    (128, 4096): 38.317,
    (128, 8192): 68.778,
    (256, 8192): 71.212,
}
# 12 heads that share one key head, on a die of an A3: another chip, for which a 910B2 is predicted.
A3 = {32768: 37_600.0, 65536: 149_600.0, 131072: 600_000.0}
MEASURED_CHIP = CHIPS["910B2"]
# The measured kernel's tiles, on the paper's schedule. Its Vector slices are not known: 16 rows are assumed.
MEASURED_TILING = Tiling(PUBLISHED_TILE[0], PUBLISHED_TILE[1], 16, preload=2, multibuffer=True)
PAPER_TFLOPS = 238.2  # the paper's peak on a 910B, of which neither SKU, length nor tiles are told
PAPER_GAIN = 10.7  # its best over standard attention, of which no more is told either


@dataclass(frozen=True)
class Validated:
    """A length's measurements beside the prediction."""

    seqlen: int
    measured: Measured
    prediction: ChipPrediction

    @property
    def error(self) -> float:
        """Of the prediction, relative to the open kernel."""
        return self.prediction.seconds * 1e6 / self.measured.open_kernel - 1.0

    @property
    def allowed(self) -> float:
        """The largest error that the model may have."""
        return ALLOWED_ERROR[self.seqlen]


def single_head(seqlen: int) -> SimulatedCall:
    """The problem that was measured."""
    return SimulatedCall(1, seqlen, seqlen, 1, 1, PUBLISHED_TILE[2], PUBLISHED_TILE[2], torch.float16)


def of_a3(seqlen: int) -> SimulatedCall:
    """Likewise, of A3."""
    return replace(single_head(seqlen), nheads=12)


def validate(tiling: Tiling = MEASURED_TILING) -> list[Validated]:
    """The model on every length that was measured."""
    return [
        Validated(seqlen, measured, predict(single_head(seqlen), tiling, MEASURED_CHIP))
        for seqlen, measured in MEASURED.items()
    ]


def simulated_stages(chip: Chip = MEASURED_CHIP) -> dict[str, float]:
    """Cycles of each stage of the published tile by itself, its operands being at hand."""
    shape = Shape(PUBLISHED_TILE[2], PUBLISHED_TILE[2], 2)
    setting = Setting(chip, MEASURED_TILING, shape, cached(chip, DEFAULT_COSTS.write_share), DEFAULT_COSTS)
    begin = 1e6  # keys, values and weights are in L1 long before
    _, scores = CubeUnit(setting, []).scores(0, begin)
    *_, products = CubeUnit(setting, []).products(0, begin, 0.0)
    _, weights = VectorUnit("Vector", setting, []).softmax(0, False, 0.0, 0.0)
    _, updated = VectorUnit("Vector", setting, []).update(0, 0.0)
    return {"QK": scores - begin, "softmax": weights, "PV": products - begin, "O update": updated}


def residuals() -> dict[str, float]:
    """Of the simulated stages, relative to the published ones."""
    return {stage: cycles / PUBLISHED_STAGES[stage] - 1.0 for stage, cycles in simulated_stages().items()}
